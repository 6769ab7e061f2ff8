"""Weights in fewer bits than they compute in.

    dequantize.py   a stored tensor of any supported format -> a plain one

Knows bytes and block layouts; nothing of models or files.
"""
