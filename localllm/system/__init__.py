"""What differs between Linux, Windows and macOS: one file for each concern, and nothing else asks which system it is.

They raise OSError, know nothing of models, and import nothing that a system lacks before they know where they are.
"""
