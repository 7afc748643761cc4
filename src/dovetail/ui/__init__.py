"""Live page for runs, experiments and federations: `dovetail ui`.

The modules of this folder read files and stores and return plain values; only `dovetail.ui.pages` and
`dovetail.ui.server` import nicegui. None of them imports torch.
"""
