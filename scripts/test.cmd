@echo off
rem As scripts/test, for Windows: the logic is in environment.py.
setlocal
set "python=python"
where /q py && set "python=py -3"
%python% "%~dp0environment.py" test %*
