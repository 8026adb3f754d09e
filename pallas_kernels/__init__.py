"""Hot loops of the optimizers, one folder an operation (SCAPE, arXiv 2607.01678, section 4).

An operation's `reference.py` is its plain-JAX form: it runs on every device and is what a kernel is tested
against. No GPU kernel is written yet, so the plain-JAX form is what runs everywhere in version 0.1.0.
"""
