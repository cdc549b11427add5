"""The commands of the command line, a file each: their options, and the call of the package that does the work. ``cli`` registers them."""
