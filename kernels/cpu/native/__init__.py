"""The sources of the CPU kernels in C++, and what compiles them.

`vec.h` is the vocabulary, `threads.h` how work is shared; each other file is one kind of operation. No header of
Python, torch or C++'s library.
"""
