"""KServe's v2 protocol over gRPC, and repositories of models in Triton's layout."""
