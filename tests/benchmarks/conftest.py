import pytest


@pytest.fixture
def check_refused(bench, tmp_path, capsys):
    """A function that checks that arguments end a benchmark, naming the last one, before anything is built."""

    def check(arguments):
        with pytest.raises(SystemExit) as stop:
            bench.main([*arguments, "--output", str(tmp_path / "out")])
        assert stop.value.code == 2
        assert arguments[-1] in capsys.readouterr().err
        assert not (tmp_path / "out").exists()

    return check
