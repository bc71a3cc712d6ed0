//! A value on its way into the spec: its key, place, content and problems.

use std::cell::RefCell;
use std::fmt;

use serde::de;

use super::limits;
use crate::recipe::schema::reading::wrong_type;
use crate::recipe::syntax::diagnostic::{Diagnostic, Severity};
use crate::recipe::syntax::node::{Entry, Node, Value, joined};
use crate::recipe::syntax::scalar::{Resolved, Schema};
use crate::recipe::syntax::source::{ValueSource, ValueSources};
use crate::util::suggest::short;

pub(super) struct Record<'d> {
    pub value_sources: ValueSources,
    pub diagnostics: &'d mut Vec<Diagnostic>,
}

impl Record<'_> {
    pub fn report(&mut self, node: &Node, rule: &str, message: String, help: impl Into<String>) {
        self.diagnostics
            .push(Diagnostic::error(rule, Some(node.span), message, help));
    }

    pub fn has_error(&self) -> bool {
        self.diagnostics
            .iter()
            .any(|d| d.severity == Severity::Error)
    }
}

/// A message of serde's code, which becomes a diagnostic at its node.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Failure(pub String);

impl de::Error for Failure {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Failure(message.to_string())
    }

    fn missing_field(field: &'static str) -> Self {
        Failure(format!("`{field}` is missing"))
    }
}

pub(super) struct NodeDeserializer<'n, 'r, 'd> {
    pub node: &'n Node,
    /// The native path of `node`.
    pub path: String,
    /// The node is the content of an enum's variant, whose `kind` has been read.
    pub variant: bool,
    pub record: &'r RefCell<Record<'d>>,
}

impl<'n, 'r, 'd> NodeDeserializer<'n, 'r, 'd> {
    /// The key, as the user's file spells it.
    pub fn name(&self) -> &str {
        self.node.key.as_deref().unwrap_or(if self.path.is_empty() {
            "spec"
        } else {
            &self.path
        })
    }

    pub fn child(&self, name: &str, node: &'n Node) -> Self {
        NodeDeserializer {
            node,
            path: joined(&self.path, name),
            variant: false,
            record: self.record,
        }
    }

    /// Records the place of a value that a file states. The content of a variant shares the place
    /// of its enum.
    pub fn record_place(&self) {
        let Some(key) = self.node.key.as_ref().filter(|_| !self.variant) else {
            return;
        };
        let place = ValueSource {
            key: key.clone(),
            span: self.node.span,
        };
        self.record
            .borrow_mut()
            .value_sources
            .insert(self.path.clone(), place);
    }

    pub fn report(&self, rule: &str, message: String, help: impl Into<String>) {
        self.record
            .borrow_mut()
            .report(self.node, rule, message, help);
    }

    pub fn wrong_type(&self, expected: &str) {
        let problem = wrong_type(self.name(), self.node, Schema::Core, expected);
        self.record.borrow_mut().diagnostics.push(problem);
    }

    /// A whole number within bounds, or 0 after a report.
    pub fn integer(&self, min: i128, max: i128) -> i128 {
        self.record_place();
        let Some(value) = self.node.int(Schema::Core) else {
            self.wrong_type("a whole number");
            return 0;
        };
        let range = || format!("give a whole number from {min} to {max}");
        let help = match (min..=max).contains(&value) {
            true => limits::of_int(&self.path, value),
            false => Some(limits::help(&self.path).unwrap_or_else(range)),
        };
        match help {
            Some(help) => {
                self.out_of_range(&shown(self.node), help);
                0
            }
            None => value,
        }
    }

    pub fn float(&self) -> f64 {
        self.record_place();
        let value = match self.node.resolve(Schema::Core) {
            Some(Resolved::Float(value)) => value,
            Some(Resolved::Int(value)) => value as f64,
            _ => {
                self.wrong_type("a number");
                return 0.0;
            }
        };
        let odd = match value.is_nan() {
            true => "not a number",
            false => "infinite",
        };
        let range = limits::help(&self.path).unwrap_or_else(|| "give a finite number".to_owned());
        let found = match value.is_finite() {
            true => limits::of_float(&self.path, value).map(|help| (value.to_string(), help)),
            false => Some((format!("{}, {odd}", shown(self.node)), range)),
        };
        match found {
            Some((found, help)) => {
                self.out_of_range(&found, help);
                0.0
            }
            None => value,
        }
    }

    fn out_of_range(&self, found: &str, help: String) {
        // A default of the dialect has no place.
        let span = self.node.key.as_ref().map(|_| self.node.span);
        let message = format!("`{}` is {found}", self.name());
        let diagnostics = &mut self.record.borrow_mut().diagnostics;
        // The reader may have refused the value.
        if span.is_none() || diagnostics.iter().all(|d| d.span != span) {
            diagnostics.push(Diagnostic::error("out-of-range", span, message, help));
        }
    }

    pub fn text(&self) -> String {
        self.record_place();
        match self.node.text() {
            Some(text) if !self.node.is_null(Schema::Core) => text.to_owned(),
            _ => {
                self.wrong_type("text");
                String::new()
            }
        }
    }

    /// The entries of a mapping; an empty value counts as an empty mapping.
    pub fn entries(&self) -> &'n [Entry] {
        self.record_place();
        match &self.node.value {
            Value::Mapping(entries) => entries,
            // `schedule: norm-test` is the kind alone, with default settings.
            Value::Scalar(_) if self.variant => &[],
            _ if self.node.is_null(Schema::Core) => &[],
            _ => {
                self.wrong_type("a mapping");
                &[]
            }
        }
    }
}

/// The scalar as written, truncated if it is long.
pub(super) fn shown(node: &Node) -> String {
    short(node.text().unwrap_or_default())
}
