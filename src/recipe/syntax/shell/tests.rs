use proptest::prelude::*;

use super::word::UnresolvedExtent;
use super::*;

/// The commands of a text whose environment is unknown.
fn read(text: &str, file: FileId, form: Form) -> Result<Vec<Line>, Span> {
    super::read(text, file, form, &BTreeMap::new())
}

fn texts(text: &str, form: Form) -> Vec<Vec<String>> {
    let lines = read(text, FileId(0), form).unwrap().into_iter();
    lines
        .map(|line| line.words.into_iter().map(|word| word.text).collect())
        .collect()
}

/// The words of the last command of a script.
fn last(script: &str) -> Vec<Word> {
    let lines = read(script, FileId(0), Form::Script);
    let lines = lines.unwrap_or_else(|at| panic!("{script}: {at:?}"));
    lines.last().unwrap().words.clone()
}

/// The words of the last command, joined by `|`; `?` marks an unresolved word.
fn expanded(script: &str) -> String {
    shown(last(script))
}

fn shown(words: Vec<Word>) -> String {
    let shown = words.into_iter().map(|word| {
        if word.unresolved.is_empty() {
            word.text
        } else {
            format!("?{}", word.text)
        }
    });
    shown.collect::<Vec<_>>().join("|")
}

#[test]
fn words_are_split_as_in_a_shell() {
    let script = "#!/bin/bash\n# a comment\nN=4 torchrun \\\n  --a 'x y' --b=\"1\\\"2\" --c\\ d; echo done\n";
    assert_eq!(
        texts(script, Form::Script),
        [
            vec!["N=4", "torchrun", "--a", "x y", "--b=1\"2", "--c d"],
            vec!["echo", "done"],
        ]
    );
}

/// Each result is that of bash 5.2.
#[test]
fn words_end_where_they_end_in_bash() {
    for (script, expected) in [
        ("run --a=b#c '' \"\" x\"y\"'z'", "run|--a=b#c|||xyz"),
        (
            "run [a,b] ++m.x=1 {x} *.json ~/x !a",
            "run|[a,b]|++m.x=1|{x}|*.json|~/x|!a",
        ),
        ("run a1\\\nb c\\\n d", "run|a1b|c|d"),
        ("run $'x y' $\"z\" 5$ a\\$b", "run|?$'x y'|?$\"z\"|5$|a$b"),
        ("run \"a\nb\" 'c\\d' \"e\\f\\\\\"", "run|a\nb|c\\d|e\\f\\"),
        ("run a > log --b 4 2>&1 5", "run|a|--b|4|5"),
        ("> log run 2>x a", "run|a"),
        ("run a <<E --b\n$N\nE\n", "run|a|--b"),
        ("N=4 M=5\nrun $N$M", "run|45"),
        ("A='x y'\nB=2\nexport C=3\nrun", "run"),
        ("run 2 >x", "run|2"),
        ("run '2'>x", "run|2"),
        ("run \"x $N y\" \"$N  $N\"", "run|?x $N y|?$N  $N"),
        ("N=4\nrun \"x $N y\" \"$N  $N\"", "run|x 4 y|4  4"),
        ("A=\nrun a $A b \"$A\"", "run|a|b|"),
        (
            "run {a,b} --x={1..3} '{a,b}'",
            "run|?{a,b}|?--x={1..3}|{a,b}",
        ),
    ] {
        assert_eq!(expanded(script), expected, "{script}");
    }
}

/// Each result is that of bash 5.2.
#[test]
fn what_the_parser_refuses_and_bash_accepts_is_read() {
    for (script, expected) in [
        ("run a \\ \n", "run|a| "),
        ("run a \\ b \\ # c", "run|a| b| #|c"),
        ("run a `# c` b", "run|a|b"),
        ("run a \\\n  `# c` \\\n b", "run|a|b"),
        ("A=(\n x \\ # c 1\n)\nrun b", "run|b"),
        ("run a\n# b\\\n# c\nrun d", "run|d"),
        ("Y=${Y:-['n','c']}\nrun $Y d", "run|?$Y|d"),
        (
            "# it's\nrun ${X:-['a','b']} \"it's\" # \"c",
            "run|?${X:-['a','b']}|it's",
        ),
        ("cat <<E\n# it's `\nE\nrun \\ x `# c` y", "run| x|y"),
        ("cat <<-'E'\n\ta \\ \n\tE\nrun \\ x", "run| x"),
        ("run $'it\\'s' \\ x", "run|?$'it\\'s'| x"),
        ("A=$(ls # c)\n) \nrun \\ x", "run| x"),
        ("run ${#A} a#b $# \\ x", "run|?${#A}|a#b|?$#| x"),
        (
            "A=a/b\nB=\"x-${A//'/'/_}\"\nrun ${A%'b'} \"$B\" ${A/\"a\"}",
            "run|?${A%'b'}|?$B|?${A/\"a\"}",
        ),
        ("x 2>&1 | y | z w\nrun a >f", "run|a"),
        (
            "if x; then\n  x 2>&1 | y 'z' | tee $F\nelse\n  x >f | y | run a\nfi",
            "run|a",
        ),
        ("case x in\nx | y | z)\n run a >f;;\nesac", "run|a"),
        ("cat <<E | x | y z\na | b | c\nE\nrun \\ x >f", "run| x"),
    ] {
        assert_eq!(expanded(script), expected, "{script}");
    }
    // A quote that nothing closes stays an error.
    assert!(read("run \\ x 'a", FileId(0), Form::Script).is_err());
}

#[test]
fn eval_runs_the_command_in_its_arguments() {
    for (script, expected) in [
        ("c='run a b'\neval $c", "run|a|b"),
        ("c='run \"a b\" c'\neval \"$c\"", "run|a b|c"),
        (
            "n=2\nc=\"run $n \\\n --a b\"\neval $c --c",
            "run|2|--a|b|--c",
        ),
        ("a=A\nb=B\nc=\"run $a \\\n  $b \\\n\"\neval $c", "run|A|B"),
        ("eval run a '$X'", "run|a|?$X"),
        ("eval 'echo x; run a'", "run|a"),
        ("eval \"$(conda hook)\"", "eval|?$(conda hook)"),
        ("eval \"$c\"", "eval|?$c"),
    ] {
        assert_eq!(expanded(script), expected, "{script}");
    }
    let words = last("c=\"run ${N:-4}\"\neval $c");
    assert_eq!(words[0].defaults, [("N".to_owned(), "4".to_owned())]);
}

#[test]
fn the_arguments_of_a_script_are_given_as_one_text() {
    for (given, script, expected) in [
        ("", "run a \"$@\"", "run|a"),
        ("--x 1", "run a \"$@\" b", "run|a|--x|1|b"),
        ("--x 1", "if y; then run $*; fi", "run|--x|1"),
        ("--x", "f() { run \"$@\"; }\nf a", "run|?$@"),
        ("--x", "shift\nrun \"$@\"", "run|?$@"),
        ("--x", "run \"a$@\"", "run|?a$@"),
    ] {
        let environment = BTreeMap::from([("@".to_owned(), given.to_owned())]);
        let lines = super::read(script, FileId(0), Form::Script, &environment).unwrap();
        let mut runs = lines.into_iter().filter(|line| line.words[0].text == "run");
        assert_eq!(shown(runs.next().unwrap().words), expected, "{script}");
    }
}

#[test]
fn given_variables_are_the_environment_of_a_script() {
    let environment =
        [("G", "4"), ("B", "")].map(|(name, value)| (name.to_owned(), value.to_owned()));
    let environment = BTreeMap::from(environment);
    for (script, expected) in [
        ("run $G ${G:-8} ${B:-2} ${B-2}", "run|4|4|2"),
        ("N=$((G * 2))\nrun $N", "run|8"),
        ("G=${G:-8}\nrun $G", "run|4"),
        // What the user gives is what the script runs with.
        ("G=16\nrun $G", "run|4"),
        ("if x; then G=16; fi\nrun $G", "run|4"),
        ("source x\nrun $G", "run|4"),
        ("run $H", "run|?$H"),
    ] {
        let lines = super::read(script, FileId(0), Form::Script, &environment).unwrap();
        assert_eq!(
            shown(lines.last().unwrap().words.clone()),
            expected,
            "{script}"
        );
    }
}

#[test]
fn a_quotient_names_the_variables_that_divided_it() {
    let divisors = |script: &str| {
        let word = last(script).pop().unwrap();
        let names = word
            .divisors
            .iter()
            .map(|(name, value)| format!("{name}={value}"));
        (word.text, names.collect::<Vec<_>>().join(" "))
    };
    for (script, text, expected) in [
        ("B=128\nG=16\nrun $((B / G))", "8", "G=16"),
        ("B=128\nG=16\nA=$((B / 4 / G))\nrun $A", "2", "G=16"),
        (
            "B=128\nG=8\nN=2\nrun --a=$((B / (G * $N)))",
            "--a=8",
            "G=8 N=2",
        ),
        ("B=128\nG=8\nrun $((B * G))", "1024", ""),
        ("G=4\nA=$(expr 16 / $G)\nrun $A", "4", "G=4"),
        ("G=4\nrun `expr $G + 3`", "7", ""),
        ("G=4\nrun $(expr $G \\* 3)", "12", ""),
        ("G=4\nrun $(expr $G '*' 3)", "12", ""),
        ("G=4\nrun $(expr $G * 3)", "$(expr $G * 3)", ""),
        ("G=4\nrun $(expr $G \\* 3 + 1)", "$(expr $G \\* 3 + 1)", ""),
        ("G=4\nrun $(echo 4 / $G)", "$(echo 4 / $G)", ""),
    ] {
        assert_eq!(
            divisors(script),
            (text.to_owned(), expected.to_owned()),
            "{script}"
        );
    }
}

#[test]
fn an_arguments_file_is_split_as_upstream() {
    let file = "--a '1\n2' # $x \\\n";
    assert_eq!(
        texts(file, Form::ArgumentsFile),
        [["--a", "'1", "2'", "#", "$x", "\\"]]
    );
    assert!(texts(" \n", Form::ArgumentsFile).is_empty());
}

#[test]
fn a_word_has_its_line_and_column() {
    let text = "torchrun \\\n  --größe=\"16\" x";
    let words = last(text);
    let key = &words[1];
    assert_eq!((key.span.line, key.span.column), (2, 3));
    let value = key.after("--größe=".len());
    assert_eq!(&text[value.span.start..value.span.end], "\"16\"");
    assert_eq!((value.text.as_str(), value.span.column), ("16", 11));
    assert_eq!((words[2].span.line, words[2].span.column), (2, 16));
}

#[test]
fn a_word_ends_before_a_continued_line() {
    let text = "train.py --a 1\\\n  ; echo";
    let first = read(text, FileId(0), Form::Script).unwrap().remove(0);
    let last = &first.words[2];
    assert_eq!(
        (last.text.as_str(), &text[last.span.start..last.span.end]),
        ("1", "1")
    );
}

#[test]
fn assigned_variables_expand_as_in_a_shell() {
    for (script, expected) in [
        (
            "A='x y'\nrun $A \"$A\" ${A}z k=$A",
            "run|x|y|x y|?${A}z|?k=$A",
        ),
        ("export N=4 M=2; run --n=$N$M", "run|--n=42"),
        ("N=4\nA=\"--n $N\"\nrun $A end", "run|--n|4|end"),
        ("CMD='torchrun t.py'\n$CMD --n 4", "torchrun|t.py|--n|4"),
        ("N=4\nrun ${N:-8} ${N-8}", "run|4|4"),
        ("N=\nrun ${N:-8} x${N-8}", "run|8|x"),
        ("run ${N:-8} ${N-9} \"${N:-a b}\"", "run|8|9|a b"),
        ("run ${N:-\"8\"} ${N-'a'} \"${N:-\"8\"}\"", "run|8|a|8"),
        ("N=${N:-\"x/y\"}\nrun $N/z", "run|x/y/z"),
        ("M=2\nrun ${N:-$M} ${N:-${M}}", "run|2|2"),
        ("N=${N:-8}\nrun $N", "run|8"),
        ("N=\nrun a $N b ${N}", "run|a|b"),
        ("N=4\nrun '$N' \\$N", "run|$N|$N"),
        ("N=4\n(( N == 2 )) && x\nrun $N", "run|4"),
        ("N=4\nif (( N > 2 )); then x; fi\nrun $N", "run|4"),
        ("N=4\nM=$((N * 2))\nrun $N $M", "run|4|8"),
        (
            "N=7\nrun $((2 * 3 - 4 - 1)) $((N / 2 + (N % 4) * ${N})) $[N+1]",
            "run|1|24|8",
        ),
        ("N=4\nprintf '%s' $N\nrun $N", "run|4"),
        ("N=4\nfor f in $N *.json; do x; done\nrun $N", "run|4"),
        ("N=4\nexport M=$N PATH=$PATH:x\nrun $M $N", "run|4|4"),
        (
            "N=4\nsource venv/bin/activate\n. ~/.bashrc\nrun $N",
            "run|4",
        ),
        ("N=4\neval \"$(conda shell.bash hook)\"\nrun $N", "run|4"),
        ("run ${1:-8} ${2-a}", "run|8|a"),
        (
            "export N=4\nM=5\nexport M\nbash -c 'run $N ${M} --x'",
            "run|4|5|--x",
        ),
        ("source env.sh\nN=4\nrun $N", "run|4"),
        (
            "N=4\ncase $x in\n --n|-n) M=$2; shift;;\n (*) x;;\nesac\nrun $N",
            "run|4",
        ),
        ("A='x\u{a0}y'\nrun x\u{a0}y", "run|x\u{a0}y"),
        ("N=4\nf() { run $N; }\n", "run|4"),
        ("N=4\nN=5\nrun $N", "run|5"),
        (
            "A='--n 4'\nA=\"$A --m 5\"\nA+=' --k'\nrun $A",
            "run|--n|4|--m|5|--k",
        ),
        ("N=4\nN+=5\nrun $N", "run|45"),
        (
            "A=(--n 4) # x\nA+=(--m 'x y')\nrun \"${A[@]}\"",
            "run|--n|4|--m|x y",
        ),
        (
            "N=4\nA=(run \\\n  --n $N # x\n  $M)\n\"${A[@]}\" end",
            "run|--n|4|?$M|end",
        ),
        ("A=()\nrun \"${A[@]}\" a", "run|a"),
        (": \"${N:=8}\"\nrun $N ${M:=4} $M", "run|8|4|4"),
        ("N=4\nrun ${N:?set it} ${M:?}", "run|4|?${M:?}"),
    ] {
        assert_eq!(expanded(script), expected, "{script}");
    }
}

#[test]
fn a_variable_that_may_have_another_value_stays_unresolved() {
    for script in [
        "run $N",
        "N=$(nproc)\nrun $N",
        "N=$1\nrun $N",
        "N=$(nproc)\nM=${N:-8}\nrun $M",
        "read N\nrun ${N:-8}",
        "source env.sh\nrun ${N:-8}",
        "if x; then N=4; fi\nrun ${N:-8}",
        "f() { run ${N:-8}; }\nN=4",
        "N=${N:-\"a b\"}\nrun $N",
        "N=${N:-${M:-2}}\nrun $N",
        "N=${N:-$M}\nrun $N",
        "run ${N:-\"*.json\"}",
        "run \"${N:-'8'}\"",
        "run ${N:+8}",
        "N=4\nrun ${N%4}",
        "N=4\nrun ${N:0:1}",
        "N=4\nrun ${#N}",
        "N=A\nA=4\nrun ${!N}",
        "set -- 4\nrun $1",
        "N=04\nrun $((N + 1))",
        "run $((4 / 0))",
        "N=9223372036854775807\nrun $((N + 1))",
        "N=2\nrun $((N ** 2))",
        "A=\"a$((1 + $2))\"\nrun $A",
        "if x; then\n  N=4\nfi\nrun $N",
        "x && N=4\nrun $N",
        "N=4 && x\nrun $N",
        "x | N=4\nrun $N",
        "N=4 &\nrun $N",
        "(N=4)\nrun $N",
        "f() { N=4; }\nrun $N",
        "function f {\n N=4\n}\nrun $N",
        "for N in 1 2; do x; done\nrun $N",
        "case $x in\n a) N=4;;\nesac\nrun $N",
        "N=4\nread N\nrun $N",
        "N=4\nsource env.sh\nrun $N",
        "f() { eval x; }\nN=4\nf\nrun $N",
        "N=4\n$X N=5\nrun $N",
        "N=4 run $N",
        "N=2\nN=4 f\nrun $N",
        "A=(1 2)\nrun $A",
        "A+=5\nrun $A",
        "A=(1 2)\nA+=3\nrun \"${A[@]}\"",
        "A=(1 'x y')\nrun ${A[@]}",
        "A=([1]=2)\nrun \"${A[@]}\"",
        "A=(1)\nif x; then A+=(2); fi\nrun \"${A[@]}\"",
        "N=4\nf() { run $N; }\nN=5\nf",
        "N=4\nif x; then N=5; fi\nrun $N",
        "x | : ${N:=8}\nrun $N",
        "A=(1 2)\nrun ${A[0]}",
        "declare -i N=1+1\nrun $N",
        "N=2\n((N*=4))\nrun $N",
        "N=4\n(( N = 2 * 4 ))\nrun $N",
        "N=2\n((N++)); run $N",
        "N=2\nlet N*=4\nrun $N",
        "N=2\nlet \"N *= 2\"\nrun $N",
        "N=2\nlet M=1 N=4\nrun $N",
        "N=2\n: $((N=4))\nrun $N",
        "N=2\necho \"$((N=4))\"\nrun $N",
        "N=2\necho $[N=4]\nrun $N",
        "N=2\nX=$((N++))\nrun $N",
        "N=2\nif x; then ((N/=2)); fi\nrun $N",
        "N=2\nif ((N/=2)); then x; fi\nrun $N",
        "N=2\nfor ((i=0; i<2; N*=2, i++)); do x; done\nrun $N",
        "N=2\nV=N\n(( $V = 4 ))\nrun $N",
        "N=2\nexport \"N=4\"\nrun $N",
        "N=2\nexport 'N=4'\nrun $N",
        "N=2\ndeclare -x \"N=4\"\nrun $N",
        "N=2\ncommand export N=4\nrun $N",
        "N=2\nbuiltin read N\nrun $N",
        "N=2\ndeclare -n r=N; r=4\nrun $N",
        "declare -n r=N\nN=2\nr=4\nrun $N",
        "N=2\nr=N\nprintf -v \"$r\" 4\nrun $N",
        "N=2\nprintf -v N 4\nrun $N",
        "N=2\nprintf -vN 4\nrun $N",
        "N=2\nexport $(grep -v '^#' .env | xargs)\nrun $N",
        "N=2\nexport `cat .env`\nrun $N",
        "N=2\nexport $VARS\nrun $N",
        "N=2\nexport \"$X=4\"\nrun $N",
        "N=2\nread $X\nrun $N",
        "N=2\ncommand eval x\nrun $N",
        "N=2\ntrap 'N=4' DEBUG\nrun $N",
        "N=2\nwhile x; do run $N; N=3; done",
        "IFS=,\nA=1,2\nrun $A",
        "RANDOM=4\nrun $RANDOM",
        "case $x in\n --n) N=4;; *) N=2;;\nesac\nrun $N",
    ] {
        let words = last(script);
        let of_run = words.last().unwrap();
        let found = read(script, FileId(0), Form::Script).unwrap();
        let mut runs = found
            .iter()
            .filter(|line| line.words.iter().any(|w| w.text == "run"));
        let word = runs
            .next_back()
            .map_or(of_run, |line| line.words.last().unwrap());
        assert!(word.unresolved_extent().is_some(), "{script}: {words:?}");
    }
}

#[test]
fn reading_lines_and_traps_leave_other_variables_alone() {
    let script = "N=8\nwhile IFS= read -r l; do :; done < f\ntrap \"echo $X\" EXIT\nrun $N";
    assert_eq!(last(script)[1].text, "8");
    assert_eq!(last(script)[1].unresolved, []);
}

#[test]
fn a_default_that_the_environment_may_replace_is_known() {
    let words = last("N=${N:-8}\nM=$N\nrun $M x");
    assert_eq!(words[1].defaults, [("N".to_owned(), "8".to_owned())]);
    assert_eq!(words[2].defaults, []);
    assert_eq!(last("N=${M:-4}\nrun $((N + 1))")[1].defaults.len(), 1);
    assert_eq!(last("N=4\nrun ${N:-8}")[1].defaults, []);
}

#[test]
fn an_expanded_word_has_the_span_of_its_variable() {
    let script = "N=4\nrun --n=$N";
    let word = last(script).pop().unwrap();
    let (_, value) = word.option().unwrap();
    let value = value.unwrap();
    assert_eq!(value.text, "4");
    assert_eq!(&script[value.span.start..value.span.end], "$N");
}

#[test]
fn values_that_double_with_every_line_are_limited() {
    let mut script = "A0=xxxxxxxxxxxxxxxx\n".to_owned();
    for line in 1..60 {
        script += &format!("A{line}=$A{0}$A{0}\n", line - 1);
    }
    script += "run $A59";
    assert!(last(&script).pop().unwrap().unresolved_extent().is_some());
}

#[test]
fn here_documents_are_no_commands() {
    for script in [
        "cat > job.sh <<X\nrun 1\nX\nrun 2",
        "cat <<'X' > job.sh\nit's\nX\nrun 2",
        "cat <<-X\n\trun 1\n\tX\nrun 2",
        "cat <<X | tee log\nrun 1\nX\nrun 2",
    ] {
        let last = texts(script, Form::Script).pop();
        assert_eq!(last.unwrap(), ["run", "2"], "{script}");
    }
}

#[test]
fn a_word_reports_how_much_of_it_is_unresolved() {
    use UnresolvedExtent::{Number, Part, Whole};
    for (word, expected) in [
        ("$X", Some(Number)),
        ("${X}", Some(Number)),
        ("$(cat x)", Some(Number)),
        ("`cat x`", Some(Number)),
        ("$((1 + $1))", Some(Number)),
        ("\"$X\"", Some(Whole)),
        ("\"$@\"", Some(Number)),
        ("\"${A[@]}\"", Some(Number)),
        ("$X/a", Some(Part)),
        ("--a=$X", Some(Part)),
        ("a\"$@\"", Some(Number)),
        ("'$X'", None),
        ("\\$X", None),
        ("\"\\$X\"", None),
        ("5$", None),
    ] {
        let words = last(&format!("run {word}"));
        assert_eq!(words.len(), 2, "{word}");
        assert_eq!(words[1].unresolved_extent(), expected, "{word}");
    }
    let typed = Typed::of(&["$X".to_owned()], FileId(0));
    assert_eq!(typed.words[0].unresolved_extent(), Some(Number));
}

/// The first word of its inline script that has a text, by the place in the line.
#[test]
fn words_of_a_typed_inline_script_have_their_places() {
    for (script, word) in [
        ("torchrun train.py --x 1", "train.py"),
        ("echo 'a b'\ntorchrun train.py", "train.py"),
        ("echo \"it's\" && torchrun 'a b'", "a b"),
    ] {
        let command = ["bash", "-c", script].map(str::to_owned);
        let line = join(&command);
        let typed = Typed::of(&command, FileId(0));
        assert!(typed.is_inline_script(), "{script}");
        let mut words = typed.lines.iter().flat_map(|line| &line.words);
        let found = words.find(|found| found.text == word).unwrap();
        let Span { start, end, .. } = found.span;
        assert_eq!(found.span, Span::of(&line, start..end, FileId(0)), "{line}");
        let place = &line[start..end];
        assert_eq!(place.replace(word::ESCAPED, "'").trim_matches('\''), word);
    }
    let wrapped = ["sbatch", "--wrap=torchrun train.py"].map(str::to_owned);
    let typed = Typed::of(&wrapped, FileId(0));
    assert_eq!(typed.lines[0].words[0].text, "torchrun");
    let open = ["bash", "-c", "echo 'a"].map(str::to_owned);
    assert_eq!(Typed::of(&open, FileId(0)).lines[0].shell, Shell::Unread);
}

/// A typed word is what the program gets: nothing in it ends the command, or begins another word.
#[test]
fn typed_words_are_not_read_as_a_shell_reads_them() {
    let words = ["if", "a;b", "#c", "d 'e", ">", "(", ""].map(str::to_owned);
    let typed = Typed::of(&words, FileId(0));
    let [line] = typed.lines.as_slice() else {
        panic!("{typed:?}");
    };
    let texts: Vec<&str> = line.words.iter().map(|word| word.text.as_str()).collect();
    assert_eq!(texts, words);
}

#[test]
fn what_bash_does_not_accept_is_refused_at_its_place() {
    for text in [
        "a 'b",
        "a $(b",
        "a ${b",
        "a `b",
        "a > 'b",
        "A=(b",
        "a <(b",
        "if x; then y",
        "fi",
    ] {
        let at = read(text, FileId(0), Form::Script).unwrap_err();
        assert!(text.get(at.start..at.end).is_some(), "{text}");
    }
    let at = read("a\nb\nfor x; y\n", FileId(0), Form::Script).unwrap_err();
    assert_eq!(at.line, 3);
    let deep = "if x; then ".repeat(500) + "y" + &"; fi".repeat(500);
    assert!(read(&deep, FileId(0), Form::Script).is_err());
}

#[test]
fn a_hash_after_a_continued_substitution_begins_no_comment() {
    for text in ["run $((1))\\\n#z", "run $(a)\\\n#z", "x=(1 2)\\\n#z"] {
        assert!(read(text, FileId(0), Form::Script).is_err(), "{text}");
    }
}

/// The result is that of bash 5.2.
#[test]
fn a_hash_after_a_substitution_is_a_part_of_its_word() {
    let found = read("B=3\nrun \\ $((B - 1 - 1))#z", FileId(0), Form::Script).unwrap();
    let run = found.iter().find(|line| line.words[0].text == "run");
    let words: Vec<&str> = run
        .unwrap()
        .words
        .iter()
        .map(|it| it.text.as_str())
        .collect();
    assert_eq!(words, ["run", " 1#z"]);
}

#[test]
fn separators_that_a_script_sets_leave_words_unresolved() {
    for text in [
        "IFS=,\nrun ${B-e f}",
        "A=4 C=3\nIFS=,\nrun ${B-e f}",
        "A=1 B=2\nIFS=,\nC=a,b\nrun $C",
    ] {
        let found = read(text, FileId(0), Form::Script).unwrap();
        let run = found.iter().find(|line| line.words[0].text == "run");
        assert!(!run.unwrap().words[1].unresolved.is_empty(), "{text}");
    }
}

/// Each result is that of bash 5.2.
#[test]
fn a_backslash_at_the_end_of_a_script_is_removed() {
    for text in ["a b\\", "a b \\", "a b\\\n", "a b \\\n"] {
        assert_eq!(texts(text, Form::Script), [["a", "b"]], "{text:?}");
    }
    assert_eq!(texts("a b\\\\", Form::Script), [["a", "b\\"]]);
    let inner = read("bash -c 'a b\\'", FileId(0), Form::Script).unwrap();
    let read = inner[0].words.last().unwrap();
    assert!(
        inner[0].shell == Shell::Unread || !read.unresolved.is_empty(),
        "{inner:?}"
    );
}

proptest! {
    #[test]
    fn joined_words_split_into_the_same_words(words in prop::collection::vec("[^\0]{0,8}", 1..6)) {
        prop_assume!(!["if", "for", "case", "while", "until"].contains(&words[0].as_str()));
        // The parser reads a line of several assignments as several lines.
        prop_assume!(words.len() == 1 || !words.iter().all(|word| word.contains('=')));
        let line = join(&words);
        let split = texts(&line, Form::Script);
        prop_assert_eq!(&split, std::slice::from_ref(&words));
        let typed = Typed::of(&words, FileId(0));
        for (word, text) in typed.words.iter().zip(&words) {
            prop_assert_eq!(&word.text, text);
            let written = &line[word.span.start..word.span.end];
            prop_assert_eq!(word.span, Span::of(&line, word.span.start..word.span.end, FileId(0)));
            let quoted = format!("run {written}");
            prop_assert_eq!(&texts(&quoted, Form::Script)[0][1], text);
        }
    }

    #[test]
    fn any_text_is_read_without_a_panic(text in "[a-c$(){}\\[\\]'\"`\\\\<>&|;#= \n@*!-]{0,60}") {
        for text in [format!("bash -c {text}"), text] {
            for form in [Form::Script, Form::ArgumentsFile] {
                let Ok(script) = read(&text, FileId(0), form) else { continue };
                for word in script.iter().flat_map(|line| &line.words) {
                    prop_assert!(text.get(word.span.start..word.span.end).is_some());
                }
            }
        }
    }
}

/// The arguments of a script's last `run`, as bash gives them. `None`: bash refuses the script.
fn by_bash(script: &str) -> Option<String> {
    let folder = tempfile::tempdir().unwrap();
    let wrapper =
        "run() { OUT=$(printf '<%s>' \"$@\"); }; eval \"$1\" || exit; printf '\\1%s' \"$OUT\"";
    let output = std::process::Command::new("bash")
        .args(["-f", "-c", wrapper, "bash", script])
        .current_dir(folder.path())
        .env_clear()
        .stdin(std::process::Stdio::null())
        .output()
        .unwrap();
    let done = output.status.success() && output.stderr.is_empty();
    let text = done.then(|| String::from_utf8(output.stdout).unwrap())?;
    // In front of the mark is an error message that the script redirected.
    text.strip_prefix('\u{1}').map(str::to_owned)
}

fn statement() -> impl Strategy<Value = String> {
    let shapes = prop::sample::select(vec![
        "A=4",
        "A=4",
        "A=B",
        "A=\"x y\"",
        "A='1  2 '",
        "A=$B",
        "A=\"$B$C\"",
        "A=${B:-7}",
        "A=${B-}",
        "A=$((B+1))",
        "A=$((2 * 3 - 1 - 1))",
        "A=(1 2)",
        "A+=(3 \"x y\" $B)",
        "A=()",
        "A+=5",
        "A=\"$A 8\"",
        "A=$((A+1))",
        "export A=3",
        "export \"A=9\"",
        "export A",
        "declare -i A=1+1",
        "declare -x A=2",
        "readonly A",
        "let A=B+1",
        "((A++))",
        "((A=5))",
        "(( A == 5 ))",
        "true && A=6",
        "A=6 && true",
        "false || A=8",
        "if true; then A=7; fi",
        "if false; then A=7; else B=1; fi",
        "for A in 1 2; do :; done",
        "for ((A=0; A<2; A++)); do :; done",
        "f() { A=12; }",
        "f() { A=12; }; f",
        "f",
        "B=1 f",
        "read A <<< 13",
        "unset A",
        "eval A=14",
        "printf -v A 15",
        ": ${A:=16}",
        "A=17 true",
        "IFS=,",
        "case x in x) A=1;; esac",
        "{ A=3; }",
        "(A=4)",
        "A=5 | true",
        "true | true | true x",
        "true >/dev/null",
        "A=5 &",
        "while false; do A=1; done",
        "run $A",
        "A=3 B=4",
        "A=3 B=4 # C=5",
        "\\\n A=2",
        "set -- 1 2",
        ": $((A=4))",
        ": \"$[A+=1]\"",
        "A=4; B=$A",
        "A[0]=1",
        "cat <<E >/dev/null\n$((A=9))\nE",
        "declare -n A=B",
        "V=A; eval $V=5",
        "C=eval; $C A=5",
        "trap 'A=8' DEBUG",
        "A=a,b",
        "A=$(echo 5)",
        "A=`echo 5`",
        ": ${A:=$((B=3))}",
        "[[ x == x ]] && A=2",
        "! A=3",
        "A=$'4\\t'",
    ]);
    let names = prop::sample::subsequence(vec!["A", "B", "C"], 3);
    (shapes, names.prop_shuffle()).prop_map(|(shape, names)| {
        let renamed = |c: char| match c {
            'A' => names[0].to_owned(),
            'B' => names[1].to_owned(),
            'C' => names[2].to_owned(),
            c => c.to_string(),
        };
        shape.chars().map(renamed).collect()
    })
}

fn arguments() -> impl Strategy<Value = String> {
    let atoms = prop::sample::select(vec![
        "a",
        "--k=",
        "$A",
        "$B",
        "\"$A\"",
        "\"$B x\"",
        "${A}",
        "${C}",
        "${A:-d}",
        "${A:?m}",
        "${B:=5}",
        "\"${A[@]}\"",
        "${B[@]}",
        "${B-e f}",
        "\"${C:-g  h}\"",
        "'x y'",
        "''",
        "\"\"",
        "\\ ",
        "\\a",
        "\\\n",
        "#z",
        "$'q'",
        "$\"r\"",
        "$((A*2))",
        "$((B - 1 - 1))",
        "$((2*(A+B)))",
        "{a,b}",
        "{x}",
        "[y]",
        "\"\\$A\\n\"",
        "'$A'",
        "é",
        "!",
        "=",
        "+",
        " ",
        " ",
        " ",
        " >/dev/null ",
        " 2>&1 ",
        "\"a\nb\"",
        "2",
    ]);
    prop::collection::vec(atoms, 1..8).prop_map(|atoms| atoms.concat())
}

proptest! {
    /// What is resolved is what bash gives.
    #[test]
    fn resolved_words_are_those_of_bash(
        statements in prop::collection::vec(statement(), 0..5),
        separator in prop::sample::select(vec!["\n", "\n", "; ", "\n\n", " \n"]),
        arguments in arguments(),
    ) {
        let mut lines = statements;
        lines.push(format!("run {arguments}"));
        let script = lines.join(separator);
        let Ok(found) = read(&script, FileId(0), Form::Script) else { return Ok(()) };
        let runs = |line: &&Line| line.words.first().is_some_and(|word| word.text == "run");
        let Some(line) = found.iter().rev().find(runs) else { return Ok(()) };
        if line.words.iter().all(|word| word.unresolved.is_empty()) {
            let words = line.words[1..].iter().map(|word| format!("<{}>", word.text));
            let words = words.collect::<String>();
            let words = if words.is_empty() { "<>".to_owned() } else { words };
            if let Some(expected) = by_bash(&script) {
                prop_assert_eq!(words, expected, "{}", script);
            }
        }
    }
}
