"""Families' ways from pixels to encoder inputs, on numpy and pillow: one file each."""
