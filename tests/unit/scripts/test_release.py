"""Test scripts/release: allowed versions, the changelog, and files that name the version."""

import re
import sys

import pytest
from project import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "tools"))
import release

LOG = "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- A thing\n\n## [0.2.0] - 2026-11-26\n\n- Before\n"


@pytest.mark.parametrize("version", ["1.2.3", "1.2.4", "1.3.0", "2.0.0"])
def test_the_next_version_is_accepted(version: str) -> None:
    release.require_next("1.2.3", version)


@pytest.mark.parametrize(
    "version", ["1.2.2", "1.2.5", "1.4.0", "1.3.1", "3.0.0", "1.3", "v1.3.0", "01.3.0", "1.3.0rc1"]
)
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(release.ReleaseError, match=re.escape(version)):
        release.require_next("1.2.3", version)


def test_the_unreleased_section_gets_version_and_date() -> None:
    text = release.release_changelog(LOG, "0.3.0", "2026-12-01")
    assert "## [Unreleased]\n\n## [0.3.0] - 2026-12-01\n\n### Added\n\n- A thing\n\n## [0.2.0] - 2026-11-26" in text


def test_a_changelog_without_entries_is_unchanged() -> None:
    empty = LOG.replace("### Added\n\n- A thing\n\n", "")
    assert release.release_changelog(empty, "0.2.0", "2026-12-01") == empty
    with pytest.raises(release.ReleaseError, match="nothing under"):
        release.release_changelog(empty, "0.3.0", "2026-12-01")
    with pytest.raises(release.ReleaseError, match=r"has 0\.2\.0 already"):
        release.release_changelog(LOG, "0.2.0", "2026-12-01")
    with pytest.raises(release.ReleaseError, match="no section"):
        release.release_changelog("# Changelog\n", "0.3.0", "2026-12-01")


def test_all_files_that_name_the_version_are_updated(tmp_path) -> None:
    for name in ("pyproject.toml", "CITATION.cff", "CHANGELOG.md"):
        (tmp_path / name).write_text((ROOT / name).read_text("utf-8"), "utf-8")
    (tmp_path / "CHANGELOG.md").write_text(LOG, "utf-8")
    release.update_files(tmp_path, "7.8.9", "2030-01-02")
    assert '\nversion = "7.8.9"\n' in (tmp_path / "pyproject.toml").read_text("utf-8")
    citation = (tmp_path / "CITATION.cff").read_text("utf-8")
    assert "\nversion: 7.8.9\n" in citation and '\ndate-released: "2030-01-02"\n' in citation
    assert "cff-version: 1.2.0" in citation
    assert "## [7.8.9] - 2030-01-02" in (tmp_path / "CHANGELOG.md").read_text("utf-8")


def test_all_files_of_this_tree_name_the_same_version() -> None:
    version = re.search(r'(?m)^version = "(.*)"$', (ROOT / "pyproject.toml").read_text("utf-8"))[1]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\n## [{version}] - " in (ROOT / "CHANGELOG.md").read_text("utf-8")
