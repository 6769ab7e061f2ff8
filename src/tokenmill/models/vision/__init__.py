"""Towers: what makes embeddings of images. An image is encoded by itself, so that its bits depend
on nothing else; no tower knows of a KV cache or of a step.
"""
