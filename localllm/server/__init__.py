"""What `localllm serve` is: models that other programs on this computer ask by HTTP.

Needs the extra localllm[serve]: Starlette and uvicorn, which only app.py and listening.py import, and those only when
a server starts.
"""
