"""The runtime: meshes, parallel forward and backward, replicas, the master store and the engine."""
