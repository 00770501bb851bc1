"""DLITE in SGLang's runtime."""
