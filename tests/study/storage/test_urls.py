"""Storage URLs: their secrets are shown and stored nowhere, and a wrong one is answered with what to do."""

from __future__ import annotations

import pytest
from support import postgres
from support.instant import spec_of

from autotune.study.storage import records, urls
from autotune.study.storage.database import StoreError, open_storage


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://ann:se:c/r@et@host:5432/db", "postgresql://ann:***@host:5432/db"),
        ("postgresql+psycopg://ann@host/db?sslmode=require", "postgresql+psycopg://ann@host/db?sslmode=require"),
        ("postgresql://host/db?user=ann&password=secret&x=1", "postgresql://host/db?user=ann&password=***&x=1"),
        ("sqlite:////home/a:b@c/x.db", "sqlite:////home/a:b@c/x.db"),
    ],
)
def test_a_url_is_shown_without_its_secrets(url, shown):
    assert urls.redact_url(url) == shown
    assert urls.redact_url(shown) == shown


def test_a_url_written_down_without_its_secrets_leaves_them_to_the_driver():
    assert urls.with_password("postgresql://ann:***@host/db?password=***&x=1") == "postgresql://ann@host/db?x=1"
    assert urls.with_password("postgresql://host/db?password=***") == "postgresql://host/db"
    assert urls.with_password("postgresql://ann:secret@host/db") == "postgresql://ann:secret@host/db"


def test_the_study_file_does_not_keep_the_password():
    text = spec_of(storage="postgresql://ann:secret@host/db").to_yaml()
    assert "secret" not in text and "postgresql://ann:***@host/db" in text


@pytest.mark.parametrize(("dialect", "package"), [("postgres", "psycopg[binary]"), ("mariadb", "pymysql"), ("x", None)])
def test_the_package_of_a_driver_is_the_one_to_install(dialect, package):
    assert urls.package(f"{dialect}://host/db") == package


@pytest.mark.system
def test_a_wrong_password_is_said_in_one_line_without_it(server):
    wrong = server.url.replace(postgres.QUOTED, "guessed")
    with pytest.raises(StoreError, match=r"password authentication failed.*Check user and password") as error:
        open_storage(wrong)
    assert "guessed" not in str(error.value) and "\n" not in str(error.value)


@pytest.mark.system
def test_a_password_that_the_file_did_not_keep_is_asked_for(server, monkeypatch):
    masked = urls.redact_url(server.url)
    with pytest.raises(StoreError, match="does not keep the password: pass --storage"):
        open_storage(masked)
    monkeypatch.setenv("PGPASSWORD", postgres.PASSWORD)
    assert records.study_names(open_storage(masked)) == []


@pytest.mark.system
def test_a_database_that_is_not_there_is_named_with_what_to_do(server):
    with pytest.raises(StoreError, match=r'database "none" does not exist\. Make it first'):
        open_storage(server.url.replace("/postgres", "/none"))


def test_a_missing_driver_is_named_with_how_to_install_it():
    if __import__("importlib.util").util.find_spec("pymysql"):
        pytest.skip("the driver is installed")
    with pytest.raises(StoreError, match=r'pip install "pymysql"'):
        open_storage("mysql://ann:pw@localhost/x")
