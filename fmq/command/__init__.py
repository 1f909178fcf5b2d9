"""`python -m fmq`: what a person does with named queues at a terminal; one module per command or two."""
