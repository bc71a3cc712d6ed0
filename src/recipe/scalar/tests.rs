use super::*;
use crate::recipe::corpus;
use crate::recipe::source::Sources;
use crate::recipe::yaml;

/// The value of `a: TEXT`, in the notation of the golden table.
fn python(schema: Schema, text: &str) -> String {
    let mut sources = Sources::default();
    let document = format!("a: {text}\n");
    let file = sources.add("x.yaml", document.clone());
    let tree = yaml::parse(&document, file, &mut Vec::new()).unwrap();
    match tree.get("a").unwrap().resolve(schema).unwrap() {
        Resolved::Null => "NoneType:None".to_owned(),
        Resolved::Bool(true) => "bool:True".to_owned(),
        Resolved::Bool(false) => "bool:False".to_owned(),
        Resolved::Int(value) => format!("int:{value}"),
        Resolved::Float(value) => format!("float:{}", python_float(value)),
        Resolved::Str(value) => format!("str:{value}"),
        Resolved::Missing => "MissingMandatoryValue".to_owned(),
    }
}

/// Python's `repr` of a float for the magnitudes of the table.
fn python_float(value: f64) -> String {
    if value != 0.0 && value.abs() < 1e-4 {
        let text = format!("{value:e}");
        let (mantissa, exponent) = text.split_once("e-").unwrap();
        format!("{mantissa}e-{exponent:0>2}")
    } else {
        format!("{value:?}")
    }
}

#[test]
fn golden_scalars_resolve_like_upstream() {
    let Some(root) = corpus::root() else { return };
    let table = std::fs::read_to_string(root.join("golden/yaml_scalars.csv")).unwrap();
    let mut rows = 0;
    for row in corpus::csv(&table).skip(1) {
        let [text, pyyaml, omegaconf] = row.as_slice() else {
            panic!("three columns in {row:?}");
        };
        assert_eq!(
            &python(Schema::PyYaml, text),
            pyyaml,
            "PyYAML reads {text:?}"
        );
        assert_eq!(
            &python(Schema::OmegaConf, text),
            omegaconf,
            "OmegaConf reads {text:?}"
        );
        rows += 1;
    }
    assert!(rows > 20, "the golden table has {rows} rows");
}
