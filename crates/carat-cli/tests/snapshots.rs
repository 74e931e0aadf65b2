//! What a person sees, word for word.

mod common;

use common::{Place, wren};

#[test]
fn help() {
    let ran = Place::new().run(&["--help"]).ok();
    insta::assert_snapshot!(ran.out);
}

#[test]
fn inspect_of_the_ternary_model() {
    let ran = Place::new().run(&["inspect", &wren()]).ok();
    // Free memory differs between machines, scratch between kernels.
    let lines = ran
        .out
        .lines()
        .map(|line| match line.starts_with("memory") {
            true => "memory        [sizes]".to_owned(),
            false => line.to_owned(),
        });
    let shown = lines.collect::<Vec<_>>().join("\n");
    insta::assert_snapshot!(shown);
}
