"""Cases of the kernels, by topic: each module has a function `cases(place)`."""
