"""The differences between Linux, Windows and macOS: a file for each concern, and no checks elsewhere.

Functions raise OSError, know nothing of models, and import nothing that a system lacks before they know where they are.
"""
