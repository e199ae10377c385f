"""The fused CPU path: a small C++ library with a plain C interface, built where a compiler exists."""
