"""Compilations that outlive the process that made them.

The client's side, which knows files and nothing of what is in them: `folder` (entries on disk), `token` (what an entry
stands for), `driver.runtime.cached` (a device that looks there before it compiles). The device's side, which knows what
it has written and believes nothing else: `compilations`, with its private `records` in a `blobs` store.
"""
