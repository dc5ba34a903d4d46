"""The file that ringmaster profile writes, and what reads it."""

import json
import math

import pytest

from ringmaster_dist.bench import scale
from ringmaster_dist.cli.main import main
from ringmaster_dist.config.build import build_layout, build_problem
from ringmaster_dist.config.compose import load
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.config.profile_file import read_profile, warn_about_times

OLD = {"problem": "nanochat", "model": "nanochat_d6", "devices": [
    {"device": "cuda:0", "name": "H100", "seconds_mean": 0.5, "seconds_std": 0.1, "tokens_per_second": 9, "steps": 5}
]}  # fmt: skip


def write(path, content):
    path.write_text(json.dumps(content))
    return path


def nanochat(path, *overrides):
    return load(["problem=nanochat", "cluster.profile=file", f"cluster.profile_file={path}", *overrides])


def test_files_of_several_machines_become_one_cluster(tmp_path, capsys):
    settings = {"problem.name": "nanochat", "problem.batch": 4, "model.name": "nanochat_d6"}
    new = {**OLD, "settings": settings, "parameters": 10, "matrices": [[2, 5, 1]], "devices": [{"seconds_mean": 2.0}]}
    old, new, all_of_them = write(tmp_path / "old", OLD), write(tmp_path / "new", new), tmp_path / "all"
    assert main(["profile", f"merge={old},{new},{old}", f"output={all_of_them}"]) == 0
    assert read_profile(all_of_them).seconds == [0.5, 2.0, 0.5]
    assert read_profile(all_of_them).content["parameters"] == 10
    other = write(tmp_path / "other", {**OLD, "settings": {**settings, "problem.batch": 8}})
    assert main(["profile", f"merge={new},{other}", f"output={all_of_them}"]) == 2
    line = capsys.readouterr().err
    assert f"{new} and {other} were measured with different settings (problem.batch=4 versus 8)" in line
    assert main(["profile", f"merge={old},{write(tmp_path / 'tiny', {**OLD, 'model': 'nanochat_tiny'})}"]) == 2
    assert "(model.name=nanochat_d6 versus nanochat_tiny)" in capsys.readouterr().err
    assert main(["profile", f"merge={old}", "problem.batch=8"]) == 2
    assert "problem.batch=8 has no effect" in capsys.readouterr().err


def test_the_times_of_another_model_are_used_with_a_warning(tmp_path, capsys):
    path = write(tmp_path / "old", OLD)
    warn_about_times(nanochat(path, "model=nanochat_d6"))
    warn_about_times(load(["cluster.profile=file", f"cluster.profile_file={path}"]))  # a quadratic stands for any model
    assert capsys.readouterr().err == ""
    warn_about_times(nanochat(path))
    assert f"profile_file={path} was measured with other settings than this run has (model.name=nanochat_d6 versus " \
           "nanochat_tiny)" in capsys.readouterr().err  # fmt: skip


@pytest.mark.parametrize("content", [
    [], {}, {"devices": []}, {"devices": [{}]}, {"devices": "x"}, {**OLD, "settings": [1]},
    {"devices": [{"seconds_mean": 0}]}, {"devices": [{"seconds_mean": math.nan}]}, {"devices": [{"seconds_mean": "a"}]},
])  # fmt: skip
def test_another_file_is_refused_in_one_line(content, tmp_path):
    path = write(tmp_path / "file", content)
    with pytest.raises(UserError, match=f"^merge={path}.*"):
        read_profile(path, "merge")


def test_the_scale_of_a_cluster_follows_the_file(tmp_path):
    """The model's size and arithmetic are those of its parameters, and workers have the measured times in turn."""
    (tmp_path / "text.txt").write_text("\n".join(f"the {i} of {i * i % 97} is {i % 7}" for i in range(2000)))
    tiny = [
        "problem=nanochat",
        "data=text",
        f"data.path={tmp_path}/text.txt",
        "model.n_layer=2",
        "model.vocab_size=300",
    ]
    config = load(tiny)
    layout = build_layout(config, build_problem(config))
    path = tmp_path / "new"
    assert main(["profile", *tiny, "steps=2", "device=cpu", f"output={path}"]) == 0
    content, (seconds,) = json.loads(path.read_text()), read_profile(path).seconds
    content["devices"] += [{"seconds_mean": 4.0}]
    cluster = scale.measured(read_profile(write(path, content)))
    assert cluster.model == scale.described("nanochat_tiny", layout.parameters)
    assert cluster.of_size(3) == [seconds, 4.0, seconds]
    assert cluster.mean_rate == pytest.approx((1.0 / seconds + 0.25) / 2)
    (row,) = scale.clusters(cluster._replace(seconds=[5.0, 5.0]), [scale.Machine("one", 1e12, 1e12)] * 2, (2,))
    assert float(row["gradients/s"]) == pytest.approx(2 / (5.0 * 1.04), rel=0.05)  # the jitter adds 4 %
    assert scale.measured(read_profile(write(tmp_path / "old", OLD))).model == scale.papers().model
