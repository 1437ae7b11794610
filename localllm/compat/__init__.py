"""APIs of other Python packages, for programs written for them. No other module imports this package."""
