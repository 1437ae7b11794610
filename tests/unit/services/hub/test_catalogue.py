"""Test model names: models.toml, what names resolve to, and the models folder."""

import os
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from project import ROOT

from localllm.arch import ARCHITECTURES
from localllm.errors import ModelError, UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.files.models_folder import (
    QUANTIZATION,
    ModelFile,
    get_models_folder,
    get_size,
    group_models,
    normalize_quantization,
)
from localllm.services.hub import catalogue
from localllm.services.hub.catalogue import (
    REPOSITORY,
    HubReference,
    KnownModel,
    MissingError,
    find_removable,
    list_models_on_disk,
    load_registry,
    parse_reference,
    resolve_model,
    select_files,
)

KNOWN = load_registry()


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path) -> Path:
    """Use an empty models folder and no settings."""
    monkeypatch.setenv("LOCALLLM_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "models"


def put(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x" * len(name))


# ---- models.toml


def test_a_checkout_reads_its_own_models_toml():
    assert catalogue.get_registry_path() == ROOT / "models.toml"
    assert len(KNOWN) >= 40


def test_an_installed_package_reads_the_models_toml_beside_its_data(tmp_path, monkeypatch):
    """Ignore files of that name in folders above."""
    data = tmp_path / "site-packages" / "localllm" / "data"
    data.mkdir(parents=True)
    monkeypatch.setattr(catalogue, "DATA", data)
    for path in (data.parents[1] / "models.toml", data / "models.toml"):
        path.touch()
        assert catalogue.get_registry_path() == path


@pytest.mark.parametrize("model", KNOWN.values(), ids=list(KNOWN))
def test_every_entry_of_models_toml_is_valid(model: KnownModel):
    assert re.fullmatch(r"[a-z0-9][a-z0-9.-]*", model.name)
    assert model.architecture in ARCHITECTURES
    assert model.context >= 1024 and model.megabytes > 0 and model.license
    assert len(model.description) < 70 and model.description.isprintable()
    if model.repository:
        assert (match := REPOSITORY.fullmatch(model.repository)) and match["repository"] == model.repository
        assert model.file.count("*") == 1 and model.file.endswith("*.gguf")
        assert (
            QUANTIZATION.fullmatch(model.quantization)
            and normalize_quantization(model.quantization) == model.quantization
        )


def test_file_patterns_of_models_toml_do_not_overlap():
    files = [(model.repository, model.file.replace("*", model.quantization)) for model in KNOWN.values()]
    assert len(set(files)) == len(files)
    for model in KNOWN.values():
        pattern, own = model.file.lower(), model.file.replace("*", model.quantization).lower()
        others = [file.lower() for repository, file in files if repository == model.repository and file.lower() != own]
        assert not any(fnmatchcase(file, pattern) for file in others)


def test_the_built_in_model_matches_its_entry():
    guide = KNOWN["guide"]
    path = resolve_model("guide")
    assert os.path.getsize(path) <= 6_000_000 and guide.megabytes == round(os.path.getsize(path) / 1e6)
    with GGUFFile.open(path) as file:
        assert (file.metadata["general.architecture"], file.metadata["llama.context_length"]) == (
            guide.architecture,
            guide.context,
        )


# ---- names of files


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("Qwen3-4B-Q4_K_M", "Q4_K_M"),
        ("qwen2.5-7b-instruct-q4_k_m", "Q4_K_M"),
        ("phi-2.Q8_0", "Q8_0"),
        ("gemma-3-4b-it-f16", "F16"),
        ("model-fp16", "F16"),
        ("Qwen3-30B-A3B-UD-Q4_K_XL", "UD-Q4_K_XL"),
        ("gpt-oss-20b-mxfp4", "MXFP4"),
        ("BF16/Model-BF16", "BF16"),
        ("Q4_K_M/Model", "Q4_K_M"),
        ("IQ2_XXS-Q8_0", "Q8_0"),
        ("Model-IQ4_NL", "IQ4_NL"),
        ("tiny-TQ1_0", "TQ1_0"),
        ("Model-Q4_0_4_4", "Q4_0_4_4"),
        ("Model-7B-v0.3", ""),
        ("q4", ""),
    ],
)
def test_quantizations_are_recognized_in_file_names(name, quantization):
    (model_file,) = group_models([f"{name}.gguf"])
    assert model_file.quantization == quantization


def test_files_of_a_split_model_are_one_model():
    parts = [f"a/Big-Q8_0-0000{number}-of-00003.gguf" for number in (2, 1, 3)]
    (model_file,) = group_models([*parts, "README.md", "mmproj-Big-F16.gguf", "Big.imatrix.gguf", ".hidden.gguf"])
    assert (model_file.name, model_file.files, model_file.is_whole) == ("a/Big-Q8_0", tuple(sorted(parts)), True)
    assert not group_models(parts[:2])[0].is_whole


# ---- what a name stands for


def test_an_existing_path_is_preferred_to_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("qwen3-4b", "hf:owner", "qwen3-4b:Q8_0"):
        (tmp_path / name).touch()
        assert resolve_model(name) == name


def test_a_known_name_resolves_to_its_downloaded_file(folder):
    with pytest.raises(MissingError, match=r"`localllm pull qwen3-4b` \(about 2.5 GB\)") as failure:
        resolve_model("qwen3-4b")
    assert failure.value.exit_code == 3
    put(folder, "Qwen/Qwen3-4B-GGUF/Qwen3-4B-Q8_0.gguf")
    with pytest.raises(MissingError, match=r"`localllm pull Qwen3-4B:q5_0`; of its family, qwen3-4b:Q8_0 is here$"):
        resolve_model("Qwen3-4B:q5_0")
    assert (
        resolve_model("qwen3-4b") == resolve_model("QWEN3-4B:q8_0") == f"{folder}/Qwen/Qwen3-4B-GGUF/Qwen3-4B-Q8_0.gguf"
    )
    put(folder, "Qwen/Qwen3-4B-GGUF/Qwen3-4B-Q4_K_M.gguf", "Qwen/Qwen3-4B-GGUF/Qwen3-4B-Q2_K.gguf.abc.partial")
    assert resolve_model("qwen3-4b").endswith("Q4_K_M.gguf")
    assert [model.name for model in list_models_on_disk()] == ["qwen3-4b", "qwen3-4b:Q2_K", "qwen3-4b:Q8_0"]
    assert [model.is_whole for model in list_models_on_disk()] == [True, False, True]


def test_a_repository_name_resolves_to_its_downloaded_file(folder):
    with pytest.raises(MissingError, match="`localllm pull hf:me/Mine`"):
        resolve_model("hf:me/Mine")
    put(folder, "me/Mine/a-Q4_0.gguf", "me/Mine/b-Q4_0.gguf", "me/Mine/sub/b-Q8_0.gguf")
    assert (
        resolve_model("hf:me/Mine:Q8_0")
        == resolve_model("hf:me/Mine/sub/b-Q8_0.gguf")
        == f"{folder}/me/Mine/sub/b-Q8_0.gguf"
    )
    with pytest.raises(MissingError):  # which of the two?
        resolve_model("hf:me/Mine:Q4_0")
    names = ["hf:me/Mine/a-Q4_0.gguf", "hf:me/Mine/b-Q4_0.gguf", "hf:me/Mine:Q8_0"]
    assert [model.name for model in list_models_on_disk()] == names
    for model in list_models_on_disk():
        assert resolve_model(model.name) == str(model.path)


def test_files_put_into_the_folder_are_found_by_name(folder):
    put(folder, "mine.gguf", "sub/big-00001-of-00002.gguf", "sub/big-00002-of-00002.gguf", "notes.txt")
    assert {model.name: model.path for model in list_models_on_disk()} == {
        "mine": folder / "mine.gguf",
        "sub/big": folder / "sub/big-00001-of-00002.gguf",
    }
    for model in list_models_on_disk():
        assert resolve_model(model.name) == str(model.path)
    (folder / "sub/big-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelError, match="not on this computer"):
        resolve_model("sub/big")


def test_aliases_resolve_to_names_or_paths(folder, tmp_path, monkeypatch):
    config = tmp_path / "config/localllm/config.toml"
    config.parent.mkdir(parents=True)
    put(folder, "Qwen/Qwen3-4B-GGUF/Qwen3-4B-Q8_0.gguf")
    config.write_text(f'[aliases]\nbig = "qwen3-4b:Q8_0"\nfile = "{folder}/x.gguf"\nqwen3-8b = "big"\n')
    assert resolve_model("big") == f"{folder}/Qwen/Qwen3-4B-GGUF/Qwen3-4B-Q8_0.gguf"
    with pytest.raises(ModelError, match=f"{folder}/x.gguf: no such file"):
        resolve_model("file")
    (folder / "x.gguf").touch()
    assert resolve_model("file") == f"{folder}/x.gguf"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "big").touch()
    assert resolve_model("big") == "big", "what is there"
    (tmp_path / "big").unlink()
    assert resolve_model("qwen3-8b") == resolve_model("big"), "an alias of an alias"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen3-4", "no model of that name; did you mean qwen3-4b"),
        ("nothing-like-it", r"nothing-like-it: no such file and no model of that name \(`localllm list"),
        ("models/qwen3-4b.gguf", "models/qwen3-4b.gguf: no such file$"),
        ("../evil", "../evil: no such file$"),
        ("", ": no such file$"),
        ("qwen3-4.gguf", "qwen3-4.gguf: no such file$"),
        ("Why is it", "Why is it: no such file; put the prompt after the model, or after -p$"),
    ],
)
def test_unknown_names_are_refused_with_a_suggestion(name, message):
    with pytest.raises(ModelError, match=message) as failure:
        resolve_model(name)
    assert not isinstance(failure.value, MissingError) and failure.value.exit_code == 3


@pytest.mark.parametrize("name", ["hf:", "hf:me", "hf:me/", "hf:../x", "hf:me/..", "hf:me/x:", "hf:-a/b"])
def test_invalid_repository_names_are_refused(name):
    with pytest.raises(UsageError, match="expected hf:OWNER/REPOSITORY"):
        resolve_model(name)


def test_references_are_parsed_into_repository_and_format():
    assert (
        parse_reference("a/b") == HubReference("hf:a/b", "a/b") == HubReference("hf:a/b", "a/b", "*", "", "Q4_K_M", 0)
    )
    assert parse_reference("hf:a/b/x[1]*?.gguf") == HubReference("hf:a/b/x[1]*?.gguf", "a/b", "x[[]1][*][?].gguf")
    assert parse_reference("hf:a/b:q8_0") == HubReference("hf:a/b:q8_0", "a/b", "*", "q8_0")
    known = KNOWN["qwen3-4b"]
    for text, quantization, megabytes in (
        ("Qwen3-4B", "", known.megabytes), ("qwen3-4b:q4_k_m", "q4_k_m", known.megabytes), ("qwen3-4b:Q8_0", "Q8_0", 0)
    ):  # fmt: skip
        expected = HubReference(text, known.repository, known.file, quantization, known.quantization, megabytes)
        assert parse_reference(text) == expected
    assert parse_reference("guide") is parse_reference("nothing") is parse_reference("models/x.gguf") is None


# ---- which file of a repository


def test_a_reference_selects_one_file_of_a_repository():
    files = ["M-Q4_K_M.gguf", "M-Q8_0.gguf", "M-UD-Q3_K_XL.gguf", "M-Q6_K.gguf", "M-Q6_K-00001-of-00001.gguf"]

    def choose(text: str, names: list[str]) -> tuple[str, ...]:
        reference = parse_reference(text)
        assert reference
        return select_files(names, reference)

    assert choose("hf:a/b", files) == ("M-Q4_K_M.gguf",)
    assert choose("hf:a/b:q8_0", files) == ("M-Q8_0.gguf",)
    assert choose("hf:a/b:Q3_K_XL", files) == ("M-UD-Q3_K_XL.gguf",)
    assert choose("hf:a/b:Q6_K", files) == ("M-Q6_K.gguf",)
    assert choose("hf:a/b", files[1:2]) == ("M-Q8_0.gguf",)
    assert choose("hf:a/b:MXFP4", ["M-MXFP4_MOE.gguf", *files]) == ("M-MXFP4_MOE.gguf",)
    weighted = ["M.i1-Q4_K_M.gguf", "M.i1-Q6_K.gguf"]
    for tag in ("i1-Q4_K_M", "I1-q4_k_m", "Q4_K_M"):
        assert choose(f"hf:a/M-i1-GGUF:{tag}", weighted) == ("M.i1-Q4_K_M.gguf",)
    others = ["mmproj-model-f16.gguf", "M-mmproj-F16.gguf", "M.imatrix.gguf", "mtp-M-F16.gguf", "M-eagle3-F16.gguf"]
    assert choose("hf:a/b:F16", [*others, "M-F16.gguf"]) == ("M-F16.gguf",)
    assert choose("hf:a/b-eagle3", others[4:]) == ("M-eagle3-F16.gguf",), "a repository of a head"
    for text, names, message in (
        ("hf:a/b:F16", others[:3], "no matching GGUF file"),
        ("hf:a/b:i1-Q8_0", ["M-Q8_0.gguf"], "no I1-Q8_0; available: Q8_0"),
        ("hf:a/b", files[1:3], "several quantizations; available: Q8_0, UD-Q3_K_XL"),
        ("hf:a/b:Q5_0", files[:2], "no Q5_0; available: Q4_K_M, Q8_0"),
        ("hf:a/b:Q8_0", ["A-Q8_0.gguf", "B-Q8_0.gguf"], "several files; available: A-Q8_0.gguf, B-Q8_0.gguf"),
        (
            "hf:a/b",
            ["A.gguf", "B-Q8_0.gguf", "C-Q6_K.gguf", "D-Q6_K.gguf"],
            "several quantizations; available: A.gguf, Q8_0, C-Q6_K.gguf, D-Q6_K.gguf",
        ),
        ("hf:a/b:Q3_K_S", ["A-UD-Q3_K_S.gguf", "B-UD-Q3_K_S.gguf"], "several files; available: A-UD-Q3_K_S.gguf, B-UD"),
        ("hf:a/b/M-[Q]8_0.gguf", files, "no matching GGUF file"),
        ("hf:a/b", ["README.md"], "no matching GGUF file"),
        ("hf:a/b:Q8_0", ["M-Q8_0-00001-of-00002.gguf"], "lacks splits of M-Q8_0"),
    ):
        with pytest.raises(ModelError, match=re.escape(message)):
            choose(text, names)


def test_every_known_model_selects_its_default_file():
    for model in KNOWN.values():
        if model.repository:
            names = [model.file.replace("*", kind) for kind in ("Q2_K", model.quantization, "Q5_K_M")]
            reference = parse_reference(model.name)
            assert isinstance(reference, HubReference)
            assert select_files(names, reference) == (names[1],)


# ---- the folder


def test_the_models_folder_comes_from_environment_variables(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/me")
    for variables, expected in (
        ({}, "/home/me/.local/share/localllm/models"),
        ({"XDG_DATA_HOME": "/data"}, "/data/localllm/models"),
        ({"XDG_DATA_HOME": "data"}, "/home/me/.local/share/localllm/models"),
        ({"XDG_DATA_HOME": "/data", "LOCALLLM_MODELS": "~/m"}, "/home/me/m"),
        ({"LOCALLLM_MODELS": "/m"}, "/m"),
    ):
        for name in ("XDG_DATA_HOME", "LOCALLLM_MODELS"):
            monkeypatch.setenv(name, variables.get(name, ""))
        assert get_models_folder() == Path(expected)
    monkeypatch.setenv("LOCALLLM_MODELS", "models")
    with pytest.raises(UsageError, match="LOCALLLM_MODELS must be an absolute path"):
        get_models_folder()
    (tmp_path / "there.gguf").touch()
    assert resolve_model(tmp_path / "there.gguf") == str(tmp_path / "there.gguf")


def test_models_in_the_folder_can_be_removed(folder, tmp_path):
    put(folder, "Qwen/Qwen3-4B-GGUF/Qwen3-4B-Q4_K_M.gguf", "Qwen/Qwen3-4B-GGUF/Qwen3-4B-Q4_K_M.gguf.abc.partial")
    put(folder, "mine.gguf")
    assert len(find_removable("qwen3-4b").files) == 2
    assert find_removable("mine").files == (folder / "mine.gguf",)
    assert find_removable(str(folder / "mine.gguf")).name == "mine"
    (tmp_path / "other.gguf").touch()
    for name in (str(tmp_path / "other.gguf"), "guide"):
        with pytest.raises(ModelError, match="not in the models folder"):
            find_removable(name)
    for name in ("qwen3-8b", "nothing"):
        with pytest.raises(ModelError, match="not in the models folder"):
            find_removable(name)


def test_models_are_removed_by_any_of_their_names(folder, tmp_path):
    """Ignore case; the last model of a repository's folder takes its projectors along."""
    config = tmp_path / "config/localllm/config.toml"
    config.parent.mkdir(parents=True)
    config.write_text('[aliases]\nsmall = "MINE"\n')
    put(folder, "mine.gguf", "a/b/x-Q8_0.gguf", "a/b/y-Q8_0.gguf", "a/b/mmproj-x.gguf", "a/b/mmproj-y.gguf.0f.partial")
    put(folder, "a/b/sub/z.gguf", "mmproj-none.gguf", "a/lone.gguf", "a/mmproj-a.gguf")
    assert find_removable("MINE") == find_removable("small") == find_removable("mine")
    assert find_removable("mine").files == (folder / "mine.gguf",), "the folder itself is no repository's"
    assert find_removable("a/lone").files == (folder / "a/lone.gguf",)
    assert find_removable("hf:a/b/x-Q8_0.gguf").files == (folder / "a/b/x-Q8_0.gguf",)
    assert find_removable(str(folder / "a/b/sub/z.gguf")).files == (folder / "a/b/sub/z.gguf",)
    (folder / "a/b/x-Q8_0.gguf").unlink()
    last = find_removable("HF:A/B:q8_0")
    assert set(last.files) == {folder / "a/b" / n for n in ("y-Q8_0.gguf", "mmproj-x.gguf", "mmproj-y.gguf.0f.partial")}
    assert last.files[0] == last.path == folder / "a/b/y-Q8_0.gguf"
    assert last.size == len("a/b/y-Q8_0.gguf" + "a/b/mmproj-x.gguf" + "a/b/mmproj-y.gguf.0f.partial")
    assert last.to_dict() == {
        "name": "hf:a/b:Q8_0", "path": str(last.path), "bytes": last.size, "quantization": "Q8_0",
        "files": [str(path) for path in last.files], "complete": True, "kind": "model", "format": "Q8_0",
    }  # fmt: skip
    assert find_removable("mine").to_dict()["quantization"] is None


def test_listed_models_have_their_shortest_unique_names(folder):
    """Distinguish repositories with equal files, and files of equal quantization."""
    put(folder, "me/Mine/Qwen3-4B-Q4_K_M.gguf", "Qwen/Qwen3-4B-GGUF/Qwen3-4B-Q4_K_M.gguf", "me/Two/x.gguf", "z/y.gguf")
    put(folder, "Qwen/Qwen3-4B-GGUF/Other-Q4_K_M.gguf")
    put(folder, "me/Split/s-Q8_0-00002-of-00002.gguf", "me/Split/s-Q8_0-00001-of-00002.gguf.0f.partial")
    names = [
        "hf:Qwen/Qwen3-4B-GGUF/Other-Q4_K_M.gguf",
        "hf:me/Mine:Q4_K_M",
        "hf:me/Split:Q8_0",
        "hf:me/Two/x.gguf",
        "qwen3-4b",
        "z/y",
    ]
    assert [model.name for model in list_models_on_disk()] == names
    assert [model.is_whole for model in list_models_on_disk()] == [True, True, False, True, True, True]
    split = list_models_on_disk()[2]
    assert [path.name for path in split.files] == [
        "s-Q8_0-00002-of-00002.gguf",
        "s-Q8_0-00001-of-00002.gguf.0f.partial",
    ]
    assert get_size(folder / "none") == 0 and ModelFile("Q4_0/Model-Q8_0", (), True).quantization == "Q8_0"


def test_sizes_are_rounded_to_megabytes_or_gigabytes():
    sizes = [HubReference("x", "a/b", megabytes=megabytes).size for megabytes in (0, 1, 999, 1000, 1049, 16_400)]
    assert sizes == ["", "about 1 MB", "about 999 MB", "about 1.0 GB", "about 1.0 GB", "about 16.4 GB"]


@pytest.fixture
def unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a models folder and an owner's folder in it unreadable when its name is written to `locked`."""
    folder = tmp_path / "models"
    (folder / "owner" / "repository").mkdir(parents=True)
    (folder / "other.gguf").write_bytes(b"")
    monkeypatch.setenv("LOCALLLM_MODELS", str(folder))
    scandir = os.scandir

    def refuse(path: str) -> object:
        if str(path) == (tmp_path / "locked").read_text():
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    (tmp_path / "locked").write_text(str(folder))
    monkeypatch.setattr(os, "scandir", refuse)
    return folder


@pytest.mark.parametrize("words", ["list", "list --json", "list --all", "fit --all", "run qwen3-0.6 -p x", "rm x"])
def test_an_unreadable_models_folder_is_an_error(unreadable: Path, cli, words: str):
    code, out, err = cli(*words.split())
    assert (code, out) == (1, "")
    assert err == f"localllm: error: {unreadable}: the folder of models cannot be read: Permission denied\n"


def test_an_unreadable_folder_among_models_is_a_warning_of_list(unreadable: Path, tmp_path: Path, cli):
    (tmp_path / "locked").write_text(str(unreadable / "owner"))
    code, out, err = cli("list")
    assert code == 0 and "other" in out
    assert err == f"localllm: warning: cannot read the models in {unreadable}/owner: Permission denied\n"


def test_a_model_in_an_unreadable_folder_is_not_called_missing(unreadable: Path, tmp_path: Path, cli):
    (tmp_path / "locked").write_text(str(unreadable / "owner" / "repository"))
    code, _, err = cli("run", "hf:owner/repository:Q8_0", "-p", "x")
    assert code == 1 and "cannot be read: Permission denied" in err


def test_completion_of_an_unreadable_folder_offers_nothing(unreadable: Path, cli, monkeypatch):
    monkeypatch.setenv("_LOCALLLM_COMPLETE", "bash")
    assert cli("run", "")[1] == ""
