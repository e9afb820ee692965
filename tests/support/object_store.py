"""Object store for tests: moto's server, which speaks S3 over HTTP on loopback and keeps everything in memory."""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest

BUCKET = "bucket"


@dataclass(frozen=True)
class ObjectStore:
    """Server that runs, with one bucket."""

    endpoint: str
    address: str
    """Address of the bucket."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which s3fs finds the server; the keys are checked by nobody."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "a-secret-of-the-tests",
            "AWS_DEFAULT_REGION": "us-east-1",
        }


@contextmanager
def object_store() -> Generator[ObjectStore]:
    """Context manager: a store with an empty bucket, which this process's environment names."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
    server: Any = import_module("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    files: Any = import_module("s3fs").S3FileSystem
    try:
        host, port = server.get_host_and_port()
        made = ObjectStore(f"http://{host}:{port}", f"s3://{BUCKET}")
        with urllib.request.urlopen(urllib.request.Request(f"{made.endpoint}/{BUCKET}", method="PUT")):
            pass
        with pytest.MonkeyPatch.context() as patch:
            for name, value in made.environment.items():
                patch.setenv(name, value)
            files.clear_instance_cache()  # of an earlier server
            yield made
    finally:
        files.clear_instance_cache()
        server.stop()
