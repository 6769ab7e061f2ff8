"""From rows to what the model reads, and the sampled tokens back into the rows.

protocol.py  what the runner expects
host.py      rows and model share the host's memory
device.py    rows are mirrored on a GPU, where steps are gathered; sampled ids stay there
staging.py   the way from the host to a GPU and back
"""
