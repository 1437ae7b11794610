"""The differences between Linux, Windows and macOS: a file for each concern, and no checks elsewhere.

Functions raise OSError, are independent of models, and import platform modules only on their platform.
"""
