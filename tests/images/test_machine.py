from configparser import ConfigParser

from tests.images import machine


def test_a_build_gets_the_index_and_the_certificate_but_no_folder_of_this_machine(tmp_path):
    said = {
        "index-url": "https://index.invalid/simple",
        "extra-index-url": "file:///srv/simple https://more.invalid/simple",
        "cert": "/srv/ca.pem",
        "find-links": f"/nowhere {tmp_path}",
    }
    given = machine.derived(said, tmp_path)
    assert str(given.secrets["ca"]) == "/srv/ca.pem"
    assert given.wheelhouse == tmp_path
    configuration = ConfigParser()
    configuration.read(given.secrets["pip"])
    assert configuration.sections() == ["global"]
    assert dict(configuration["global"]) == {
        "index-url": said["index-url"],
        "extra-index-url": said["extra-index-url"].split()[1],
        "cert": "/run/secrets/ca.pem",
    }


def test_a_build_gets_nothing_where_pip_is_told_nothing(tmp_path):
    assert machine.derived({}, tmp_path) == machine.Passed({}, None)
    assert list(tmp_path.iterdir()) == []
