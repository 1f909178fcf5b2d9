"""The Open Inference Protocol, version 2: models of a folder on one device, for clients that know nothing of Burst.

process.py   `burst serve DEVICE --oip ADDRESS --models FOLDER`: everything below, until SIGTERM
grpc_door.py, http_door.py   one address each: they decode, call the service and encode
service.py   what the protocol can be asked for, in dicts and arrays
repository.py   the models of the folder: found, loaded, watched; served_model.py   one version of one model
regions.py   shared memory that clients registered
"""
