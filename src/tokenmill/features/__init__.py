"""Features that meet the engine at a seam each, and are wired in `core/build.py` and
`worker/build.py`: a folder each, which knows neither scheduler nor runner.
"""
