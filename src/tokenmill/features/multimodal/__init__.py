"""Images beside text.

    processing.py   host: what a family does to an image, and the registry of families
    processors/     host: one file a family

The host half loads no torch: it runs in the process of the HTTP server.
"""
