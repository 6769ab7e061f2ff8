"""Several processes for one model: what a rank has of it, and how ranks put their results together.

A layer is given its group and knows nothing of processes; a group of one rank is `SOLO`, which
costs nothing.
"""
