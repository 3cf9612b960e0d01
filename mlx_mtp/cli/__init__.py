"""The command line: parses, imports late and calls. Everything it can do the Python API can."""

from __future__ import annotations


def main() -> None:
    """Console entry point. The imports are in here: Ctrl-C may come during them, too."""
    try:
        from mlx_mtp.cli.app import main as run

        run()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
