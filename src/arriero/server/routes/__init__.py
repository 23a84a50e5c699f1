"""One file per API; each exports a list of Starlette routes."""
