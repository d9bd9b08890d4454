"""`shoal submit`: files that hold no job's specification, and what is not repeated of them."""

import pytest
from shoal_controller.cli.submit import read_spec
from shoal_protos.errors import UserError


@pytest.mark.parametrize("value", ["*hush", "!hush x", "{hush", "'hush"])
def test_a_spec_that_is_not_yaml_is_refused_without_what_is_in_it(value, tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(f"job: c\nenv: {{API_KEY: {value}}}\n")
    with pytest.raises(UserError) as refusal:
        read_spec(file)
    assert "cannot be read as a job spec: it is not YAML in line " in str(refusal.value)
    assert "hush" not in str(refusal.value)
