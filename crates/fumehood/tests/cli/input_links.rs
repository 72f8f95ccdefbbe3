//! Which directory a link called `data` or `docs` may show: a visible directory of the project, or a directory that the
//! caller names.

use std::os::unix::fs::symlink;
use std::path::Path;

use testkit::command::finish;
use testkit::home::TestHome;
use testkit::trial;

use crate::submit::RunningWorker;

const SHOW: &str = "cat data/.env data/table docs/.env docs/table 2>/dev/null; true";

fn test_home() -> TestHome {
    let test_home = TestHome::new();
    test_home.write("other/.env", "SECRET\n");
    test_home.write("other/table", "SECRET\n");
    test_home.write("project/.git/table", "SECRET\n");
    test_home.write("project/.git/.env", "SECRET\n");
    test_home.write("project/.hidden/table", "SECRET\n");
    test_home.write("project/.env", "SECRET\n");
    test_home.write("project/table", "SECRET\n");
    test_home.write("project/site/table", "SECRET\n");
    test_home.write("project/site/deep/table", "SECRET\n");
    test_home.write("project/backend/.env.local", "SECRET\n");
    test_home.write("project/backend/table", "SECRET\n");
    test_home.write("project/storage/2024/table", "measured\n");
    test_home
}

fn relink(test_home: &TestHome, name: &str, to: &Path) {
    let link = test_home.project.join(name);
    let _none = std::fs::remove_file(&link);
    symlink(to, link).unwrap();
}

fn is_refused(test_home: &TestHome, name: &str, to: &Path, line: &str) {
    relink(test_home, name, to);
    let ended = test_home.sh(&[], SHOW);
    assert!(!ended.out().contains("SECRET"), "{name} -> {to:?}");
    ended.refused(125, line);
    std::fs::remove_file(test_home.project.join(name)).unwrap();
}

trial!(
    Everyone,
    a_link_called_data_shows_nothing_outside_the_project
);
fn a_link_called_data_shows_nothing_outside_the_project() {
    let test_home = test_home();
    let other = test_home.path("other").canonicalize().unwrap();
    for name in ["data", "docs"] {
        let line = format!("    --{name} {}\n", other.display());
        is_refused(&test_home, name, Path::new("../other"), &line);
        is_refused(&test_home, name, &other, &line);
        // The link leads out of the project through another link, which is in the project.
        relink(&test_home, "hop", &other);
        is_refused(&test_home, name, Path::new("hop"), &line);
        relink(&test_home, "hop", Path::new(".."));
        is_refused(&test_home, name, Path::new("hop/other"), &line);
        is_refused(&test_home, name, Path::new("/"), &format!("--{name} /"));
        is_refused(&test_home, name, Path::new(".."), &format!("--{name} "));
        // Control: the option that the error prints works, and so do the variable and the user's own file.
        relink(&test_home, name, &other);
        let flag = format!("--{name}");
        let named = other.to_str().unwrap();
        let ended = test_home.sh(&[&flag, named], SHOW);
        assert_eq!(ended.good(), "SECRET\nSECRET\n");
        let mut command = test_home.run_command(["--", "sh", "-c", SHOW]);
        command.env(format!("FUMEHOOD_{}", name.to_uppercase()), &other);
        assert_eq!(finish(command).good(), "SECRET\nSECRET\n");
        let own = test_home.write(
            "person/.config/fumehood/config.toml",
            format!("{name} = {named:?}\n"),
        );
        assert_eq!(test_home.sh(&[], SHOW).good(), "SECRET\nSECRET\n");
        std::fs::remove_file(own).unwrap();
        std::fs::remove_file(test_home.project.join(name)).unwrap();
    }
}

trial!(
    Everyone,
    a_link_called_data_shows_nothing_private_of_the_project
);
fn a_link_called_data_shows_nothing_private_of_the_project() {
    let test_home = test_home();
    let real = |name: &str| test_home.project.join(name).canonicalize().unwrap();
    for to in [".", ".git", ".hidden", "site", "site/deep", "backend"] {
        let to = Path::new(to);
        is_refused(&test_home, "data", to, "--data ");
    }
    is_refused(&test_home, "docs", &real("."), "--docs ");
    // Controls: a link to a visible directory of the project, and a real directory with any content.
    for to in [Path::new("storage/2024").to_owned(), real("storage/2024")] {
        relink(&test_home, "data", &to);
        assert_eq!(test_home.sh(&[], SHOW).good(), "measured\n");
    }
    std::fs::remove_file(test_home.project.join("data")).unwrap();
    test_home.write("project/data/.env", "its own\n");
    test_home.write("project/data/.git/config", "");
    assert_eq!(test_home.sh(&[], SHOW).good(), "its own\n");
}

trial!(
    Everyone,
    a_projects_file_shows_nothing_private_of_the_project
);
fn a_projects_file_shows_nothing_private_of_the_project() {
    let test_home = test_home();
    for (named, says) in [
        ("backend", "--data "),
        ("site", "--data "),
        ("../other", "--data"),
        (".git", "--data"),
    ] {
        test_home.write("project/fumehood.toml", format!("data = {named:?}\n"));
        let ended = test_home.sh(&[], SHOW);
        assert!(!ended.out().contains("SECRET"), "{named}");
        ended.refused(125, says);
    }
    test_home.write("project/fumehood.toml", "data = \"storage/2024\"\n");
    assert_eq!(test_home.sh(&[], SHOW).good(), "measured\n");
}

trial!(
    Everyone,
    a_link_called_data_is_followed_when_it_is_submitted
);
fn a_link_called_data_is_followed_when_it_is_submitted() {
    let test_home = test_home();
    let ask = |words: &[&str]| test_home.ask(words.iter().copied());
    let submit = |id: &str, more: &[&str]| {
        let mut words = vec!["submit", "--id", id, "--retries", "0"];
        words.extend(more);
        words.extend(["--", "sh", "-c", SHOW]);
        ask(&words)
    };
    relink(&test_home, "data", &test_home.path("other"));
    submit("x", &[]).refused(125, "--data ");
    relink(&test_home, "data", Path::new("storage/2024"));
    submit("a", &[]).good();
    submit("b", &[]).good();
    let link = test_home.project.join("data");
    submit("c", &["--data", link.to_str().unwrap()]).good();
    // A later change of the link has no effect, because nobody has named its new target.
    relink(&test_home, "data", &test_home.path("other"));
    std::fs::remove_file(&link).unwrap();
    test_home.write("project/data/table", "later\n");
    submit("d", &[]).good();
    std::fs::remove_dir_all(&link).unwrap();
    relink(&test_home, "data", &test_home.path("other"));
    let worker = RunningWorker::at_any_level(&test_home);
    ask(&["wait", "a", "b", "c", "d"]);
    drop(worker);
    for id in ["a", "b", "c"] {
        assert_eq!(ask(&["logs", id]).good(), "measured\n", "{id}");
    }
    let ended = ask(&["show", "d"]);
    let shown = ended.out();
    assert!(
        shown.contains("error") && shown.contains("--data"),
        "{shown}"
    );
    assert!(!ask(&["logs", "d"]).out().contains("SECRET"));
}

trial!(Everyone, links_in_data_show_nothing_outside_data);
fn links_in_data_show_nothing_outside_data() {
    let test_home = test_home();
    test_home.write("project/data/table", "measured\n");
    let other = test_home.path("other");
    for (name, to) in [
        ("up", Path::new("..")),
        ("env", Path::new("../.env")),
        ("other", other.as_path()),
        ("cwd", Path::new("/proc/1/cwd")),
    ] {
        symlink(to, test_home.project.join("data").join(name)).unwrap();
    }
    let script = "cat data/env data/other/table data/up/table data/up/.git/table data/cwd/table 2>/dev/null; cat data/table";
    for level in ["full", "landlock"] {
        let ended = test_home.sh(&["--level", level], script);
        assert_eq!(ended.good(), "measured\n", "{level}");
    }
}

trial!(Root, a_script_behind_another_users_link_is_not_copied);
fn a_script_behind_another_users_link_is_not_copied() {
    let test_home = TestHome::new();
    let secret = test_home.write("secret", "the secret is out\n");
    let link = test_home.project.join("a.sh");
    symlink(&secret, &link).unwrap();
    // Control: a link that belongs to the caller.
    let ended = test_home.run([link.to_str().unwrap()]);
    assert!(ended.err().contains("line 1: the"), "{}", ended.err());
    std::os::unix::fs::lchown(&link, Some(54321), Some(54321)).unwrap();
    let ended = test_home.run([link.to_str().unwrap()]);
    ended.refused(125, "another user made");
}
