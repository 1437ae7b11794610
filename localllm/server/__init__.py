"""The HTTP server behind `localllm serve`.

Needs the extra localllm[serve]: Starlette and uvicorn, which are only imported by app.py and listener.py, and those
only when a server starts.
"""
