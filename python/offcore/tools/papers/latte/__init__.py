"""DMA-Latte's published MI300X numbers beside those of the calibrated model.

The paper is "DMA-Latte: Expanding the Reach of DMA Offloads to Latency-bound ML Communication".
`sweep` times its collectives, `rows` states its claims about them, `power` and `kv` model its
sections 5.2.9 and 5.3, `figures` draws, `page` writes. docs/measurements/model.md says how the
model was fitted, docs/model.md what is not known.
"""
