"""Run the command line: python -m localllm."""

from localllm.cli.main import program

program()
