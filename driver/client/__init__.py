"""The objects that an application holds: devices, prepared models, bursts and buffers, and how they recover."""
