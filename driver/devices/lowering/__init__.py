"""What devices have in common that hand models to a library.

errors: what a library lacks, fails at, or cannot compute.
placing: operations with the shapes of their operands, one after the other, and which of them can be lowered.
node: a graph that is being lowered, and one operation of it. recurrent: the cells, for any library's arithmetic.
model: devices and prepared models whose programs a library compiles.
"""
