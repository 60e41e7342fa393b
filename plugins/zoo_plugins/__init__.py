"""The built-in architectures, written as plugins like those of third parties."""
