"""Records of stored files and of batches in Redis. They belong to no pool; `files.lua` is the only script."""
