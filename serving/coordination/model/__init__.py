"""The same decisions as the library in Valkey, in memory: for a process on its own, and to test the library against."""
