//! The shape of a recipe's model: the recipe's keys override those of a `config.json`, which override those of
//! a well-known hub model.

use std::collections::BTreeMap;

use serde_json::Value;

use super::known;
use super::shape::{LLAMA, Shape};
use crate::recipe::schema::spec::Model;

impl Shape {
    /// Keys that a model of unknown architecture must state: a vocabulary or a width alone does not
    /// determine a shape.
    pub const REQUIRED: [&str; 3] = ["hidden_size", "num_hidden_layers", "vocab_size"];

    /// The shape of a recipe's model, and one line on its source: the recipe's
    /// keys, over those of the `config.json` at its path (if the caller has read one), over
    /// those of a well-known hub id. `None` if too little is known.
    pub fn of(
        model: &Model,
        config_at_path: Option<&BTreeMap<String, Value>>,
    ) -> Option<(Shape, String)> {
        let known = model.path.as_deref().and_then(known::find);
        let stated = |key: &str| {
            let own = model.config.get(key);
            own.or_else(|| config_at_path.and_then(|config| config.get(key)))
        };
        if known.is_none() && Shape::REQUIRED.iter().any(|key| stated(key).is_none()) {
            return None;
        }
        let base = known.map_or(&LLAMA, |known| &known.shape);
        let shape = base.with(&stated)?;
        let source = match (known, &model.path) {
            _ if config_at_path.is_some() => "config.json".to_owned(),
            (Some(known), Some(path)) if known.id != path => {
                format!("{path} has the shape of {}", known.id)
            }
            (Some(known), _) => known.id.to_owned(),
            (None, _) => "model.config".to_owned(),
        };
        let changed = known.is_some() && shape != *base && config_at_path.is_none();
        Some((
            shape,
            source + if changed { ", with keys changed" } else { "" },
        ))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn model(path: Option<&str>, config: Value) -> Model {
        Model {
            path: path.map(str::to_owned),
            config: serde_json::from_value(config).unwrap(),
            ..Model::default()
        }
    }

    #[test]
    fn keys_of_the_recipe_win_over_the_known_shape() {
        let shrunk = model(
            Some("mistralai/Mistral-7B-v0.1"),
            json!({"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                   "intermediate_size": 128, "vocab_size": 260}),
        );
        let (shape, source) = Shape::of(&shrunk, None).unwrap();
        assert_eq!((shape.layers, shape.hidden, shape.head_dim), (2, 64, 16));
        assert_eq!(shape.key_value_heads, 4);
        assert_eq!(source, "mistralai/Mistral-7B-v0.1, with keys changed");
    }

    #[test]
    fn a_config_alone_is_enough_if_it_states_the_sizes() {
        let sizes = json!({"hidden_size": 256, "num_hidden_layers": 8, "vocab_size": 4096,
            "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 688});
        let (shape, _) = Shape::of(&model(None, sizes), None).unwrap();
        assert_eq!(shape.parameters(), 8_425_728.0);
        assert_eq!(
            Shape::of(&model(None, json!({"hidden_size": 256})), None),
            None
        );
        assert_eq!(Shape::of(&model(Some("acme/own"), json!({})), None), None);
    }

    #[test]
    fn absurd_sizes_count_as_unknown() {
        for value in [json!(0), json!(-1), json!(1_u64 << 40), json!("wide")] {
            let model = model(
                Some("mistralai/Mistral-7B-v0.1"),
                json!({"hidden_size": value}),
            );
            assert_eq!(Shape::of(&model, None), None);
        }
    }
}
