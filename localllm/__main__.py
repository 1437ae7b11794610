"""python -m localllm is localllm."""

from localllm.cli.main import program

program()
