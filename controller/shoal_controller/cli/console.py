"""The console script. All else is imported inside it, so that Ctrl-C never prints a traceback."""


def main() -> None:
    """`shoal`."""
    try:
        from shoal_controller.cli.main import main as command

        command()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
