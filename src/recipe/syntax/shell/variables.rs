//! Variables that the text assigns: `GPUS=8`, `ARGS="--seed 1"`, `ARGS=(--seed 1)`, with or without
//! `export`. A variable stays unresolved when a loop, a condition, a second assignment, arithmetic or a
//! program sets it, or when its value comes from the environment.
//!
//! Source: POSIX.1-2024, Shell Command Language, 2.5 to 2.6.5; arrays as in bash 5.2. File names are
//! not expanded. Words are split at white space; `IFS` is ignored.

use std::collections::{HashMap, HashSet};

use super::assign::{self, Change};
use super::scan::Line;
use crate::recipe::syntax::shell::word::{Assignment, Unresolved, Word};
use crate::recipe::syntax::yaml::MAX_BYTES;

#[derive(Debug, Clone, PartialEq, Eq)]
enum Value {
    Text(String),
    List(Vec<String>),
}

#[derive(Debug, Clone)]
struct Variable {
    /// `None`: unresolved.
    value: Option<Value>,
    /// Bytes of the value.
    length: usize,
    /// The value before expansion.
    written: Option<Word>,
    /// Byte offset of the assignment. The variable is unresolved before it.
    at: usize,
}

/// The variables of a script.
#[derive(Debug, Default)]
pub(crate) struct Variables {
    known: HashMap<String, Variable>,
    exported: HashSet<String>,
    /// Bytes of all expanded values so far. Nested variables can double with every assignment.
    spent: usize,
    /// The script declares a name reference (`declare -n`), so any assignment may change any variable.
    renamed: bool,
}

impl Variables {
    /// The variables that the commands of a script assign.
    pub fn of(lines: &[Line]) -> Variables {
        let mut variables = Variables::default();
        for line in lines {
            variables.run(line);
        }
        variables
    }

    fn run(&mut self, line: &Line) {
        for change in assign::changes(line) {
            match change {
                Change::Assigns(assignment, word) => self.assign(&assignment, word, line.certain),
                Change::Doubts(assignment, word) => self.assign(&assignment, word, false),
                Change::Exports(name) => {
                    self.exported.insert(name.to_owned());
                }
                Change::Changes(name, at) => self.forget(name, at),
                Change::Defaults(name, at) => {
                    let known = self.known.get(name).and_then(|known| known.value.as_ref());
                    if !matches!(known, Some(Value::Text(text)) if !text.is_empty()) {
                        self.forget(name, at);
                    }
                }
                Change::ChangesAnything => {
                    for variable in self.known.values_mut() {
                        variable.value = None;
                    }
                }
                Change::Renames => self.renamed = true,
            }
        }
    }

    fn forget(&mut self, name: &str, at: usize) {
        let unknown = Variable {
            value: None,
            length: 0,
            written: None,
            at,
        };
        self.known.insert(name.to_owned(), unknown);
    }

    fn assign(&mut self, assignment: &Assignment<'_>, word: &Word, certain: bool) {
        let (name, at) = (assignment.name, word.span.start);
        if !certain || !assignment.whole || self.known.contains_key(name) {
            self.forget(name, at);
            return;
        }
        let written = assignment.value.clone();
        let value = match &word.items {
            Some(items) => {
                let items = items.iter().flat_map(|item| self.expand(item));
                let items: Vec<Word> = items.collect();
                let resolved = items.iter().all(|item| item.unresolved.is_empty());
                resolved.then(|| Value::List(items.into_iter().map(|item| item.text).collect()))
            }
            None => {
                // A value is not split.
                let mut whole = written.clone();
                whole
                    .unresolved
                    .iter_mut()
                    .for_each(|part| part.quoted = true);
                match self.expand(&whole).as_slice() {
                    [one] if one.unresolved.is_empty() => Some(Value::Text(one.text.clone())),
                    _ => None,
                }
            }
        };
        let length = match &value {
            Some(Value::Text(text)) => text.len(),
            Some(Value::List(items)) => items.iter().map(|item| item.len() + 1).sum(),
            None => 0,
        };
        let variable = Variable {
            value,
            length,
            written: Some(written),
            at,
        };
        self.known.insert(name.to_owned(), variable);
    }

    /// The value that the script exports under a name, with an empty text if the value is unresolved.
    /// `None`: the script does not export the name.
    pub fn exported(&self, name: &str) -> Option<Word> {
        let variable = self
            .known
            .get(name)
            .filter(|_| self.exported.contains(name))?;
        let mut word = variable.written.clone()?;
        word.text = match &variable.value {
            Some(Value::Text(text)) => text.clone(),
            _ => String::new(),
        };
        word.unresolved.clear();
        Some(word)
    }

    /// The words that a word expands to, each with the span of the original word. Unresolved variables
    /// stay in them.
    pub fn expand(&mut self, word: &Word) -> Vec<Word> {
        let known = |part: &Unresolved| self.value(part, word.span.start).is_some();
        if !word.unresolved.iter().any(known) {
            return vec![word.clone()];
        }
        let mut fields = Fields::of(word);
        let mut at = 0;
        for part in &word.unresolved {
            fields.text(&word.text[at..part.start]);
            at = part.end;
            let value = self.value(part, word.span.start).cloned();
            let put = match part.quoted {
                true => Fields::quoted,
                false => Fields::split,
            };
            match value {
                Some(Value::Text(value)) => {
                    self.spent += value.len();
                    put(&mut fields, &value);
                }
                Some(Value::List(items)) => {
                    for (index, item) in items.iter().enumerate() {
                        self.spent += item.len() + 1;
                        if index > 0 {
                            fields.end();
                        }
                        put(&mut fields, item);
                    }
                }
                None => fields.unknown(&word.text[part.start..part.end], part),
            }
        }
        fields.text(&word.text[at..]);
        fields.end();
        fields.done
    }

    /// The value of an expansion at a byte offset of the text.
    fn value(&self, part: &Unresolved, at: usize) -> Option<&Value> {
        let name = part.name.as_ref()?;
        let variable = self.known.get(name).filter(|_| !self.renamed)?;
        let value = variable.value.as_ref().filter(|_| variable.at < at)?;
        let fits = match value {
            // `${NAME:-x}` of an empty variable is `x`; `$NAME` and `${NAME}` have at most this length.
            Value::Text(text) => {
                !part.all && (!text.is_empty() || part.end - part.start <= name.len() + 3)
            }
            Value::List(_) => part.all,
        };
        let affordable = self.spent.saturating_add(variable.length) <= MAX_BYTES;
        (fits && affordable).then_some(value)
    }
}

/// The words that one word expands to, built from left to right.
struct Fields<'w> {
    word: &'w Word,
    done: Vec<Word>,
    current: Option<Word>,
}

impl<'w> Fields<'w> {
    fn of(word: &'w Word) -> Fields<'w> {
        Fields {
            word,
            done: Vec::new(),
            current: None,
        }
    }

    fn current(&mut self) -> &mut Word {
        // Only the first word begins with literal text.
        let literal = match self.done.is_empty() {
            true => self.word.literal,
            false => 0,
        };
        self.current.get_or_insert_with(|| Word {
            text: String::new(),
            unresolved: Vec::new(),
            items: None,
            literal,
            ..self.word.clone()
        })
    }

    fn text(&mut self, text: &str) {
        if !text.is_empty() {
            self.quoted(text);
        }
    }

    fn quoted(&mut self, text: &str) {
        self.current().text.push_str(text);
    }

    fn split(&mut self, text: &str) {
        for (index, field) in text.split([' ', '\t', '\n']).enumerate() {
            if index > 0 {
                self.end();
            }
            self.text(field);
        }
    }

    fn unknown(&mut self, text: &str, part: &Unresolved) {
        let current = self.current();
        let start = current.text.len();
        current.text.push_str(text);
        let end = current.text.len();
        current.unresolved.push(Unresolved {
            start,
            end,
            ..part.clone()
        });
    }

    fn end(&mut self) {
        if let Some(mut word) = self.current.take() {
            word.literal = word.literal.min(word.text.len());
            self.done.push(word);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::scan::{Form, commands};
    use super::*;
    use crate::recipe::syntax::source::FileId;

    /// The words of the last command of a script.
    fn last(script: &str) -> Vec<Word> {
        let lines = commands(script, FileId(0), Form::Script);
        let mut variables = Variables::of(&lines);
        let words = lines.last().unwrap().words.iter();
        words.flat_map(|word| variables.expand(word)).collect()
    }

    /// The words of the last command, joined by `|`; `?` marks an unresolved word.
    fn expanded(script: &str) -> String {
        let words = last(script).into_iter();
        let shown = words.map(|word| match word.unresolved.is_empty() {
            true => word.text,
            false => format!("?{}", word.text),
        });
        shown.collect::<Vec<_>>().join("|")
    }

    #[test]
    fn assigned_variables_expand_as_in_a_shell() {
        for (script, expected) in [
            (
                "A='x y'\nrun $A \"$A\" ${A}z k=$A",
                "run|x|y|x y|x|yz|k=x|y",
            ),
            ("export N=4 M=2; run --n=$N$M", "run|--n=42"),
            ("N=4\nA=\"--n $N\"\nrun $A end", "run|--n|4|end"),
            (
                "A=(--n 4 'x y')\nrun \"${A[@]}\" ${A[@]}",
                "run|--n|4|x y|--n|4|x|y",
            ),
            (
                "A=(\n  --n 4 # four\n  --m\n)\nrun p\"${A[@]}\"",
                "run|p--n|4|--m",
            ),
            ("N=4\nrun ${N:-8}", "run|4"),
            ("N=\nrun a $N b ${N}", "run|a|b"),
            ("N=4\nrun '$N' \\$N", "run|$N|$N"),
            ("N=4\n(( N == 2 )) && x\nrun $N", "run|4"),
            ("N=4\nif (( N > 2 )); then x; fi\nrun $N", "run|4"),
            ("N=4\nM=$((N * 2))\nrun $N", "run|4"),
            ("N=4\n: ${N:=8}\nrun $N", "run|4"),
            ("N=4\nprintf '%s' $N\nrun $N", "run|4"),
            ("N=4\nfor f in $N *.json; do x; done\nrun $N", "run|4"),
            ("export \"N=4\"\nrun $N", "run|4"),
            ("N=4\nexport \"M=$N\" PATH=$PATH:x\nrun $M $N", "run|4|4"),
            (
                "N=4\ncase $x in\n --n|-n) M=$2; shift;;\n (*) x;;\nesac\nrun $N",
                "run|4",
            ),
            ("A=$'x\u{a0}y'\nrun x\u{a0}y", "run|x\u{a0}y"),
        ] {
            assert_eq!(expanded(script), expected, "{script}");
        }
    }

    #[test]
    fn a_variable_that_may_have_another_value_stays_unresolved() {
        for script in [
            "run $N",
            "N=4\nN=5\nrun $N",
            "N=$(nproc)\nrun $N",
            "N=$1\nrun $N",
            "N=${N:-8}\nrun $N",
            "if x; then\n  N=4\nfi\nrun $N",
            "x && N=4\nrun $N",
            "x | N=4\nrun $N",
            "(N=4)\nrun $N",
            "f() { N=4; }\nrun $N",
            "function f {\n N=4\n}\nrun $N",
            "for N in 1 2; do x; done\nrun $N",
            "case $x in\n a) N=4;;\nesac\nrun $N",
            "N=4\nread N\nrun $N",
            "N=4\nsource env.sh\nrun $N",
            "N=4\nN+=5\nrun $N",
            "N=4 run $N",
            "N=\nrun ${N:-8}",
            "A=(1 2)\nrun $A",
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
            "N=\n: ${N:=4}\nrun $N",
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
            "case $x in\n --n) N=4;; *) N=2;;\nesac\nrun $N",
        ] {
            let words = last(script);
            let unresolved = words.last().unwrap().unresolved_extent();
            assert!(unresolved.is_some(), "{script}: {words:?}");
        }
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
}
