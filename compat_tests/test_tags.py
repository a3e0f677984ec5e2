"""Explicitly named models have one set of tags on every generation."""

from legacy_gradlog import tags

TAGS_OF_THE_RICH_MODEL = {
    "embedding/embeddings_0",
    "shared/kernel_0",
    "shared/bias_0",
    "encoder/d1/kernel_0",
    "encoder/d1/bias_0",
    "encoder/bn/gamma_0",
    "encoder/bn/beta_0",
    "encoder/bn/moving_mean_0",
    "encoder/bn/moving_variance_0",
    "out1/kernel_0",
    "out1/bias_0",
    "out2/kernel_0",
    "out2/bias_0",
}


def named(model):
    return [weight.tag for weight in tags.name_weights(model)]


def test_the_same_tags_everywhere(fw):
    """For a second model too, whose variables TensorFlow names differently."""
    for _ in range(2):
        found = named(fw.rich_model().model)
        assert len(found) == len(TAGS_OF_THE_RICH_MODEL)
        assert set(found) == TAGS_OF_THE_RICH_MODEL


def test_a_number_of_the_users_own_stays(fw):
    class Scale(fw.layers.Layer):
        def build(self, input_shape):
            names = ["w", "w_1", "v_2"]
            self.parts = [
                self.add_weight(
                    name=name, shape=(1,), initializer=fw.keras.initializers.Ones()
                )
                for name in names
            ]
            super(Scale, self).build(input_shape)

        def call(self, inputs):
            return inputs * self.parts[0] * self.parts[1] + self.parts[2]

        def compute_output_shape(self, input_shape):
            return input_shape

    inputs = fw.layers.Input((1,))
    found = named(fw.keras.models.Model(inputs, Scale(name="scale")(inputs)))
    assert found == ["scale/w_0", "scale/w_1_0", "scale/v_2_0"]


def test_automatic_names_are_those_of_the_layers(fw):
    """Keras numbers them, the second one at least: the number stays in the tag."""
    model = fw.rich_model().model
    first, second = fw.layers.Dense(2), fw.layers.Dense(2)
    model = fw.keras.models.Model(model.inputs, second(first(model.outputs[1])))
    assert second.name[-1].isdigit()
    expected = [layer.name + "/kernel_0" for layer in (first, second)]
    expected += [layer.name + "/bias_0" for layer in (first, second)]
    assert set(named(model)) == TAGS_OF_THE_RICH_MODEL.union(expected) - {
        "out1/kernel_0",
        "out1/bias_0",
    }


def test_recurrent_layers_have_no_cell_in_their_tags(fw):
    layers = fw.layers
    inputs = layers.Input((3, 2))
    recurrent = layers.Bidirectional(layers.LSTM(2, name="rnn"), name="both")
    outputs = layers.GRU(1, name="gru")(layers.Reshape((2, 2))(recurrent(inputs)))
    names = named(fw.keras.models.Model(inputs, outputs))
    parts = ["kernel_0", "recurrent_kernel_0", "bias_0"]
    ways = ["both/forward_rnn", "both/backward_rnn"]
    assert names == [way + "/" + part for way in ways + ["gru"] for part in parts]


def test_wrapped_layers_are_named_by_both(fw):
    layers = fw.layers
    inputs = layers.Input((3, 2))
    wrapped = layers.TimeDistributed(layers.Dense(1, name="inner"), name="outer")
    names = named(fw.keras.models.Model(inputs, wrapped(inputs)))
    assert names == ["outer/inner/kernel_0", "outer/inner/bias_0"]


def test_two_weights_never_share_a_tag(fw):
    """Two layers of one name, in two models that have one name too."""

    def tower():
        inputs = fw.layers.Input((2,))
        outputs = fw.layers.Dense(1, use_bias=False, name="d")(inputs)
        return fw.keras.models.Model(inputs, outputs, name="tower")

    class Tower:
        """The two towers in the shape of a model."""

        layers = [tower(), tower()]
        weights = layers[0].weights + layers[1].weights

    found = tags.name_weights(Tower())
    assert [weight.tag for weight in found] == ["tower/d/kernel_0", "tower/d/kernel_1"]
    assert [weight.path for weight in found] == ["tower/d/kernel", "tower/d/kernel_1"]
