"""Run the command line: python -m localllm."""

from localllm.cli.main import run_program

run_program()
