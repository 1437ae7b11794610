"""Compilation of kernels to machine code, once per computer, and loading of the result without Numba.

- compilers.py: processes that compile, each running compile.py (Numba to LLVM IR to an object file; pipeline.py)
- objects.py: names of the object files in the user's cache folder; shipped.py: object files in a platform wheel
- machine_code.py: links object files into this process
- library.py: finds, compiles and loads the kernels of a model, with the modules above
- faults.py: a native handler for unreadable pages of a mapped file
"""
