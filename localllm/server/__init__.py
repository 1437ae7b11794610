"""The HTTP server of `localllm serve`.

Needs the extra localllm[serve]: Starlette and uvicorn, which are only imported by app.py and listener.py, and those
only when a server starts.
"""
