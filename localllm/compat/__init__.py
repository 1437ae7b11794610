"""Interfaces of other Python packages, for programs that were written for them. Nothing else imports them."""
